"""The decoder layer of an EAGLE head by numpy, where there is no native extension."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from quasar_trt.drafters.draft_linear import DraftLinears, rms_norm, silu
from quasar_trt.drafters.eagle_layer import EagleLayer, LayerPart, LayerWeights
from quasar_trt.engines.tree_mask import depths, visible_rows
from quasar_trt.model_config import ModelConfig
from quasar_trt.rope import rope_tables
from quasar_trt.tensorfile import float32_of


class PlainEagleLayer(EagleLayer):
    """Everything is float32."""

    def __init__(
        self, config: ModelConfig, weights: LayerWeights, max_seq_len: int, max_tree: int, linears: DraftLinears
    ):
        super().__init__(max_tree)
        self._config = config
        self._qkv = linears(weights.qkv, weights.qkv_bias)
        self._dense = linears(weights.dense)
        self._gate, self._up = linears(weights.gate), linears(weights.up)
        self._down = linears(weights.down)
        self._norm = float32_of(weights.norm)
        self._cos, self._sin = rope_tables(config, max_seq_len + max_tree)
        self._empty = np.empty((2, 0, config.num_key_value_heads, config.head_size), np.float32)
        self._caches: dict[int, np.ndarray] = {}  # keys and values of each text [2, length, kv heads, head_size]
        self._handles = itertools.count()

    def open(self) -> int:
        text = next(self._handles)
        self._caches[text] = self._empty
        return text

    def close(self, text: int) -> None:
        del self._caches[text]

    def truncate(self, text: int, length: int) -> None:
        self._caches[text] = self._caches[text][:, :length]

    def __call__(self, parts: Sequence[LayerPart], x: np.ndarray, residual: np.ndarray) -> np.ndarray:
        config = self._config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qkv = self._qkv(x).reshape(len(x), heads + 2 * kv_heads, config.head_size)
        attended, first = [], 0
        for part in parts:
            rows = slice(first, first := first + part.num_rows)
            cached = self._caches[part.text]
            length = cached.shape[1]
            seen = visible_rows(part.num_rows, part.parents)
            rotated = self._rotate(qkv[rows, : heads + kv_heads], length + depths(seen))
            new = np.stack([rotated[:, heads:], qkv[rows, heads + kv_heads :]])
            self._caches[part.text] = keys, values = np.concatenate([cached, new], axis=1)
            visible = np.ones((part.num_rows, length + part.num_rows), bool)
            visible[:, length:] = seen
            attended.append(_attend(rotated[:, :heads], keys, values, visible))
        x = residual + self._dense(np.concatenate(attended))
        normed = rms_norm(x, self._norm, config.norm_epsilon)
        return x + self._down(silu(self._gate(normed)) * self._up(normed))

    def _rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        first, second = np.split(x, 2, axis=2)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)


def _attend(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """queries [rows, heads, size] of the last rows of keys and values [length, kv heads, size], visible [rows, length]
    -> [rows, heads * size]."""
    rows, heads, size = queries.shape
    _, kv_heads, _ = keys.shape
    grouped = queries.reshape(rows, kv_heads, heads // kv_heads, size).transpose(1, 2, 0, 3)  # [kv, group, rows, size]
    scores = grouped @ keys.transpose(1, 2, 0)[:, None] / np.float32(np.sqrt(size))
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    weights /= weights.sum(axis=3, keepdims=True)
    return (weights @ values.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3).reshape(rows, heads * size)
