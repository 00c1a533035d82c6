"""Random weights, far more than the caches hold, and the linears that read them."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from quasar_trt.architectures import architecture_of
from quasar_trt.bench.curve import Curve
from quasar_trt.model_config import ModelConfig
from quasar_trt.plugins import native
from quasar_trt.plugins.packing import BLOCK, packed_shape, padded

# Columns that linears read -> their output rows, all linears of one layer together.
Layer = dict[int, int]

# Hidden size 2048, MLP 8192, 32 heads and 8 KV heads of 64.
STANDARD_LAYER: Layer = {2048: 2048 + 2 * 512 + 2048 + 2 * 8192, 8192: 2048}

# One call of a linear: long enough that calling it costs nothing, short enough that its output stays in a cache.
_PIECE = 16 << 20
_PATTERN = 1 << 20  # weights drawn; the buffer repeats them

# Kind of linear -> (dtype of its input, dtype of its weight).
KINDS = {"w8a8": (np.int8, np.int8), "w8a16": (np.int16, np.int8), "bf16": (np.float32, np.uint16)}


def layer_of(config: ModelConfig) -> Layer:
    layer: Counter[int] = Counter()
    for linear in architecture_of(config).linears:
        layer[linear.in_features(config)] += padded(linear.out_features(config))
    return dict(layer)


def layer_bytes(layer: Layer, quantized: bool) -> int:
    return sum(math.prod(packed_shape(n, k, quantized)) * (1 if quantized else 2) for k, n in layer.items())


class WeightBuffer:
    """One piece of memory that the bandwidth probe reads as words and each linear as packed weights of its own kind.

    layer: what is laid out in it, again and again. least_bytes: it is no smaller, and holds one layer of any kind.
    pool: of `native.thread_pool`.
    """

    def __init__(self, layer: Layer, least_bytes: int, pool):
        self._layer = layer
        self._pool = pool
        self.nbytes = padded(max(least_bytes, layer_bytes(layer, quantized=False)), 64)
        normals = np.random.default_rng(0).normal(0, 0.02, _PATTERN).astype(np.float32)
        self._weights = _aligned(self.nbytes)
        pattern = (normals.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)  # bfloat16
        for start in range(0, self.nbytes, pattern.size):
            part = self._weights[start : start + pattern.size]
            part[:] = pattern[: part.size]

    def read(self) -> int:
        """Reads all of it with all threads; returns the sum of its 64-bit words modulo 2^64."""
        return native.sum_words(self._weights.view(np.uint64), self._pool)

    def curve(self, kind: str, rows: tuple[int, ...]) -> Curve:
        """The linears of as many layers as there is room for, one after the other, as one pass. kind: a key of `KINDS`."""
        dtype, weight_dtype = KINDS[kind]
        quantized = weight_dtype == np.int8
        pieces = self._pieces(quantized)
        inputs = {k: _input(max(rows), k, dtype) for k in self._layer}
        scale = np.ones(max(rows), np.float32) if quantized else None
        weight_scale = np.ones(max(len(weight) for _, weight in pieces) * BLOCK, np.float32) if quantized else None

        def run(count: int) -> None:
            for k, weight in pieces:
                vectors = (None, None) if scale is None else (scale[:count], weight_scale[: len(weight) * BLOCK])
                native.packed_linear(kind, inputs[k][:count], vectors[0], weight, vectors[1], k, self._pool)

        return Curve(f"{kind} linears", sum(weight.nbytes for _, weight in pieces), rows, run)

    def _pieces(self, quantized: bool) -> list[tuple[int, np.ndarray]]:
        """(k, packed weight) in the order of memory; linears that read the same columns lie side by side."""
        layers = self.nbytes // layer_bytes(self._layer, quantized)
        dtype = np.dtype(np.int8 if quantized else np.uint16)
        pieces, start = [], 0
        for k, n in self._layer.items():
            blocks, groups, *block_shape = packed_shape(n, k, quantized)
            block_bytes = groups * math.prod(block_shape) * dtype.itemsize
            rest = blocks * layers
            while rest:
                count = min(rest, max(1, _PIECE // block_bytes))
                part = self._weights[start : start + count * block_bytes]
                pieces.append((k, part.view(dtype).reshape(count, groups, *block_shape)))
                start += part.size
                rest -= count
        return pieces


def _aligned(nbytes: int) -> np.ndarray:
    """uint8 [nbytes] that begins at a multiple of 64 bytes, as packed weights do."""
    whole = np.empty(nbytes + 64, np.uint8)
    start = -whole.ctypes.data % 64
    return whole[start : start + nbytes]


def _input(rows: int, k: int, dtype) -> np.ndarray:
    """Random codes, or floats, [rows, padded k]."""
    generator = np.random.default_rng(k)
    x = np.zeros((rows, padded(k)), dtype)
    if dtype == np.float32:
        x[:, :k] = generator.normal(size=(rows, k))
    else:
        most = np.iinfo(dtype).max
        x[:, :k] = generator.integers(-most, most, (rows, k), endpoint=True)
    return x
