"""A source's tensors under checkpoint names, projections fused, each read when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from quasar_trt.architectures import architecture_of
from quasar_trt.builders.source import Source
from quasar_trt.checkpoint import EMBEDDING, FINAL_NORM, HEAD, LAYER_PREFIX
from quasar_trt.errors import QuasarError


class Converter(Mapping[str, torch.Tensor]):
    """The tensors of `checkpoint_spec(config, Recipe("none"))`; a tied head is the embedding.

    Nothing is kept, so a model takes no more memory than what its reader holds at a time. Values are BF16 or F32 as the
    source stores them; reading one that is not finite raises QuasarError naming its tensor.
    """

    def __init__(self, source: Source):
        self.config = config = source.config
        self._source = source
        architecture = architecture_of(config)
        self._parts = {EMBEDDING: [architecture.embedding]}  # checkpoint name -> what is joined along the rows
        for i in range(config.num_hidden_layers):
            ours, theirs = LAYER_PREFIX.format(i=i), architecture.layer_prefix.format(i=i)
            for norm, name in (architecture.norms | architecture.head_norms).items():
                self._parts[f"{ours}{norm}.weight"] = [theirs + name]
            for linear in architecture.linears:
                for kind in ("weight", "bias") if linear.bias(config) else ("weight",):
                    self._parts[f"{ours}{linear.name}.{kind}"] = [f"{theirs}{name}.{kind}" for name in linear.sources]
        self._parts[FINAL_NORM] = [architecture.final_norm]
        self._parts[HEAD] = [architecture.embedding if config.tie_word_embeddings else architecture.head]

    def __getitem__(self, name: str) -> torch.Tensor:
        parts = [self._read(part) for part in self._parts[name]]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def layer(self, i: int) -> dict[str, torch.Tensor]:
        """Every tensor of layer i."""
        prefix = LAYER_PREFIX.format(i=i)
        return {name: self[name] for name in self._parts if name.startswith(prefix)}

    def _read(self, name: str) -> torch.Tensor:
        tensor = self._source.tensor(name)
        extremes = torch.stack(torch.aminmax(tensor))  # one pass and no temporaries; NaN is the extreme of any tensor
        if not extremes.isfinite().all():
            raise QuasarError(
                f"{self._source.path}: {name} has values that are NaN or infinite; get an intact copy of the model"
            )
        return tensor
