"""The decoder layer of an EAGLE head, and what it remembers of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quasar_trt.drafters.draft_linear import DraftLinear, rms_norm, silu
from quasar_trt.model_config import ModelConfig
from quasar_trt.rope import rope_tables

if TYPE_CHECKING:
    from torch import Tensor


class LayerCache:
    """Keys and values of one text, float32 [length, kv heads, head_size]; rows beyond the length are overwritten."""

    def __init__(self, config: ModelConfig):
        self.length = 0
        self._rows = np.empty((2, 0, config.num_key_value_heads, config.head_size), np.float32)

    def extend(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Appends rows and returns all keys and values."""
        end = self.length + len(keys)
        if end > self._rows.shape[1]:
            grown = np.empty((2, max(end, 2 * self._rows.shape[1]), *self._rows.shape[2:]), np.float32)
            grown[:, : self.length] = self._rows[:, : self.length]
            self._rows = grown
        self._rows[:, self.length : end] = keys, values
        self.length = end
        return self._rows[0, :end], self._rows[1, :end]

    def truncate(self, length: int) -> None:
        """Forgets all rows but the first `length`."""
        self.length = length


@dataclass(frozen=True)
class TextRows:
    """One text's rows of a pass, behind those in its cache.

    positions: of each row, for RoPE. visible: [rows, length of the cache with them] bool, what each row sees; None for all up to
    itself.
    """

    cache: LayerCache
    positions: Sequence[int]
    visible: np.ndarray | None = None


class EagleLayer:
    """Attention and MLP of the head's one decoder layer.

    tensors: a Llama layer's, by names below `prefix`, but for the norms before the attention, which are the head's own.
    max_positions: beyond which no row lies.
    """

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], prefix: str, max_positions: int, pool: object | None
    ):
        import torch

        def linear(*names: str) -> DraftLinear:
            weights = [tensors[f"{prefix}{name}.weight"] for name in names]
            biases = [tensors.get(f"{prefix}{name}.bias") for name in names]
            bias = None
            if any(each is not None for each in biases):
                pairs = zip(weights, biases, strict=True)
                bias = torch.cat([torch.zeros(len(weight)) if each is None else each.float() for weight, each in pairs])
            return DraftLinear(torch.cat(weights), bias, pool)

        self.config = config
        self._qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._dense = linear("self_attn.o_proj")
        self._gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self._down = linear("mlp.down_proj")
        self._norm = tensors[f"{prefix}post_attention_layernorm.weight"].float().numpy()
        self._cos, self._sin = rope_tables(config, max_positions)

    def __call__(self, x: np.ndarray, residual: np.ndarray, texts: Sequence[TextRows]) -> np.ndarray:
        """x [rows, inputs of q, k and v] and residual [rows, hidden_size] float32, text by text -> [rows, hidden_size]; the caches
        grow by their rows."""
        config = self.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qkv = self._qkv(x).reshape(len(x), heads + 2 * kv_heads, config.head_size)
        positions = np.concatenate([text.positions for text in texts]).astype(np.int64)
        rotated = self._rotate(qkv[:, : heads + kv_heads], positions)
        attended, first = [], 0
        for text in texts:
            rows = slice(first, first := first + len(text.positions))
            keys, values = text.cache.extend(rotated[rows, heads:], qkv[rows, heads + kv_heads :])
            attended.append(_attend(rotated[rows, :heads], keys, values, text.visible))
        x = residual + self._dense(np.concatenate(attended))
        gate, up = np.split(self._gate_up(rms_norm(x, self._norm, config.norm_epsilon)), 2, axis=1)
        return x + self._down(silu(gate) * up)

    def _rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        first, second = np.split(x, 2, axis=2)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)


def _attend(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: np.ndarray | None) -> np.ndarray:
    """queries [rows, heads, size] of the last rows of keys and values [length, kv heads, size] -> [rows, heads * size]."""
    rows, heads, size = queries.shape
    length, kv_heads, _ = keys.shape
    if visible is None:
        visible = np.tri(rows, length, length - rows, dtype=bool)
    grouped = queries.reshape(rows, kv_heads, heads // kv_heads, size).transpose(1, 2, 0, 3)  # [kv, group, rows, size]
    scores = grouped @ keys.transpose(1, 2, 0)[:, None] / np.float32(np.sqrt(size))
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    weights /= weights.sum(axis=3, keepdims=True)
    return (weights @ values.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3).reshape(rows, heads * size)
