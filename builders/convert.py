"""A source's tensors under checkpoint names, projections fused."""

from __future__ import annotations

import torch

from quasar_trt.architectures import architecture_of
from quasar_trt.builders.progress import Advance
from quasar_trt.builders.source import Source
from quasar_trt.checkpoint import LAYER_PREFIX
from quasar_trt.errors import QuasarError


def convert(source: Source, advance: Advance) -> dict[str, torch.Tensor]:
    """The names of `checkpoint_spec(config, Recipe("none"))`, BF16 or F32 as the source stores them; a tied head is the
    embedding's own tensor.

    Calls `advance(1)` after each layer. Raises QuasarError naming a tensor with a value that is not finite.
    """
    config = source.config
    architecture = architecture_of(config)

    def read(name: str) -> torch.Tensor:
        tensor = source.tensor(name)
        if not tensor.isfinite().all():
            raise QuasarError(
                f"{source.path}: {name} has values that are NaN or infinite; get an intact copy of the model"
            )
        return tensor

    tensors = {"transformer.vocab_embedding.weight": read(architecture.embedding)}
    for i in range(config.num_hidden_layers):
        ours, theirs = LAYER_PREFIX.format(i=i), architecture.layer_prefix.format(i=i)
        for norm, name in (architecture.norms | architecture.head_norms).items():
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
