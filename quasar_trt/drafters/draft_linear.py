"""A linear of a drafting head: BF16 weights by the native kernel, or by numpy where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quasar_trt.engines.base import Engine
from quasar_trt.machine import usable_cpus
from quasar_trt.plugins import native
from quasar_trt.plugins.packing import pack_weight
from quasar_trt.tensorfile import float32_of, to_numpy

if TYPE_CHECKING:
    from torch import Tensor


class DraftLinear:
    """weight: [out, in], rounded to BF16; bias: [out] or None; pool: as `draft_pool` gives it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, pool: object | None):
        self._out, self._in = weight.shape
        rounded = to_numpy(weight.bfloat16())
        self._weight = float32_of(rounded) if pool is None else pack_weight(rounded)
        self._bias = None if bias is None else float32_of(bias)
        self._pool = pool

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[rows, in] float32 -> [rows, out] float32."""
        if self._pool is None:
            y = x @ self._weight.T
        else:
            rows = native.padded_rows(x)
            y = native.packed_linear("bf16", rows, None, self._weight, None, self._in, self._pool)[:, : self._out]
        return y if self._bias is None else y + self._bias


def draft_pool(engine: Engine) -> object | None:
    """Native threads for heads beside an engine, its own where it has such; None where there is no native extension."""
    if native.UNAVAILABLE:
        return None
    return getattr(engine, "pool", None) or native.thread_pool(usable_cpus())


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """x [rows, n] float32, weight [n] float32 -> [rows, n] float32."""
    return x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + epsilon) * weight


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x), without overflow."""
    return x * (0.5 + 0.5 * np.tanh(0.5 * x))
