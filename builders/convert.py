"""A source's tensors under checkpoint names, projections fused, one layer at a time."""

from __future__ import annotations

import torch

from quasar_trt.architectures import architecture_of
from quasar_trt.builders.source import Source
from quasar_trt.checkpoint import EMBEDDING, FINAL_NORM, HEAD, LAYER_PREFIX
from quasar_trt.errors import QuasarError

Tensors = dict[str, torch.Tensor]


class Converter:
    """Reads what is asked for and keeps nothing, so a model needs no more memory than what is asked for at a time.

    The names are those of `checkpoint_spec(config, Recipe("none"))`, the values BF16 or F32 as the source stores them; a
    tied head is the embedding. Every method raises QuasarError naming a tensor with a value that is not finite.
    """

    def __init__(self, source: Source):
        self.config = source.config
        self._source = source
        self._architecture = architecture_of(source.config)

    def embedding(self) -> torch.Tensor:
        """[vocab_size, hidden_size]."""
        return self._read(self._architecture.embedding)

    def layer(self, i: int) -> Tensors:
        """Every tensor of layer i."""
        architecture = self._architecture
        ours, theirs = LAYER_PREFIX.format(i=i), architecture.layer_prefix.format(i=i)
        norms = architecture.norms | architecture.head_norms
        tensors = {f"{ours}{norm}.weight": self._read(theirs + name) for norm, name in norms.items()}
        for linear in architecture.linears:
            for part in ("weight", "bias") if linear.bias(self.config) else ("weight",):
                sources = [self._read(f"{theirs}{name}.{part}") for name in linear.sources]
                tensors[f"{ours}{linear.name}.{part}"] = torch.cat(sources)
        return tensors

    def final_norm(self) -> torch.Tensor:
        """[hidden_size]."""
        return self._read(self._architecture.final_norm)

    def head(self) -> torch.Tensor:
        """[vocab_size, hidden_size]."""
        return self.embedding() if self.config.tie_word_embeddings else self._read(self._architecture.head)

    def whole(self) -> Tensors:
        """The whole model, for those that are small; a tied head is the embedding's own tensor."""
        tensors = {EMBEDDING: self.embedding()}
        for i in range(self.config.num_hidden_layers):
            tensors |= self.layer(i)
        head = tensors[EMBEDDING] if self.config.tie_word_embeddings else self.head()
        return tensors | {FINAL_NORM: self.final_norm(), HEAD: head}

    def _read(self, name: str) -> torch.Tensor:
        tensor = self._source.tensor(name)
        if not tensor.isfinite().all():
            raise QuasarError(
                f"{self._source.path}: {name} has values that are NaN or infinite; get an intact copy of the model"
            )
        return tensor
