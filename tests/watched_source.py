"""A source that tells what was read of it, and which of that was in memory at the same time."""

from __future__ import annotations

import re

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from quasar_trt.builders.source import Source


class WatchedSource(Source):
    """Another source, whose tensors are handed out as copies and watched for as long as anything holds their memory.

    read: the names in the order of reading. together: the parts of the model ("model.layers.3", or the name of a tensor
    outside of the layers) that were in memory at once, as of each reading.
    """

    def __init__(self, source: Source):
        self._source = source
        self._copies: list[tuple[str, StorageWeakRef]] = []
        self.kind, self.path, self.config = source.kind, source.path, source.config
        self.eos_token_ids, self.notices, self.names = source.eos_token_ids, source.notices, source.names
        self.read: list[str] = []
        self.together: list[frozenset[str]] = []

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self._source.tensor(name).clone()
        self._copies.append((name, StorageWeakRef(tensor.untyped_storage())))
        self.read.append(name)
        self.together.append(self.alive())
        return tensor

    def write_tokenizer(self, directory) -> None:
        self._source.write_tokenizer(directory)

    def alive(self) -> frozenset[str]:
        """The parts that are in memory now."""
        self._copies = [(name, storage) for name, storage in self._copies if not storage.expired()]
        return frozenset(re.sub(r"(model\.layers\.\d+)\..*", r"\1", name) for name, _ in self._copies)
