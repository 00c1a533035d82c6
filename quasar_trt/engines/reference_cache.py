"""The KV cache of the reference engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quasar_trt.model_config import ModelConfig


class KVCache:
    """Keys and values of one sequence. Tensors are replaced, never written to, so copies share them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device):
        empty = torch.empty(config.num_key_value_heads, 0, config.head_size, dtype=dtype, device=device)
        self.keys = [empty] * config.num_hidden_layers  # each [kv heads, length, head_size]
        self.values = [empty] * config.num_hidden_layers

    @property
    def length(self) -> int:
        return self.keys[-1].shape[1]

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends [kv heads, rows, head_size] to one layer and returns all of its keys and values."""
        self.keys[layer] = torch.cat([self.keys[layer], keys.to(self.keys[layer].dtype)], dim=1)
        self.values[layer] = torch.cat([self.values[layer], values.to(self.values[layer].dtype)], dim=1)
        return self.keys[layer], self.values[layer]

    @property
    def storage(self) -> tuple[int, int]:
        """Where the first layer's keys are, which says what is shared with copies, and their bytes."""
        storage = self.keys[0].untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    def compact(self, length: int, path: Sequence[int]) -> KVCache:
        """A cache of the first `length` tokens and those at `length` + each of `path`."""
        kept = torch.tensor([*range(length), *[length + index for index in path]], device=self.keys[0].device)
        other = object.__new__(KVCache)
        other.keys = [keys[:, kept] for keys in self.keys]
        other.values = [values[:, kept] for values in self.values]
        return other

    def first(self, length: int) -> KVCache:
        """A cache of the first `length` tokens, sharing this one's tensors."""
        other = object.__new__(KVCache)
        other.keys = [keys[:, :length] for keys in self.keys]
        other.values = [values[:, :length] for values in self.values]
        return other
