"""A source's tensors under checkpoint names: projections fused, everything in float32."""

from __future__ import annotations

import torch

from quasar_trt.architectures import architecture_of
from quasar_trt.builders.progress import Advance
from quasar_trt.builders.source import Source
from quasar_trt.checkpoint import LAYER_PREFIX


def convert(source: Source, advance: Advance) -> dict[str, torch.Tensor]:
    """The names of `checkpoint_spec(config, Recipe("none"))`, float32; a tied head is the embedding's own tensor.

    Calls `advance(1)` after each layer.
    """
    config = source.config
    architecture = architecture_of(config)

    def read(name: str) -> torch.Tensor:
        return source.tensor(name).float()

    tensors = {"transformer.vocab_embedding.weight": read(architecture.embedding)}
    for i in range(config.num_hidden_layers):
        ours, theirs = LAYER_PREFIX.format(i=i), architecture.layer_prefix.format(i=i)
        for norm, name in architecture.norms.items():
            tensors[f"{ours}{norm}.weight"] = read(theirs + name)
        for linear in architecture.linears:
            for part in ("weight", "bias") if linear.bias(config) else ("weight",):
                tensors[f"{ours}{linear.name}.{part}"] = torch.cat(
                    [read(f"{theirs}{name}.{part}") for name in linear.sources]
                )
        advance(1)
    tensors["transformer.ln_f.weight"] = read(architecture.final_norm)
    tied = config.tie_word_embeddings
    tensors["lm_head.weight"] = tensors["transformer.vocab_embedding.weight"] if tied else read(architecture.head)
    return tensors
