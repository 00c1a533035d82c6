"""Linears of a drafting head: INT8 or BF16 weights by the native kernels, or by numpy where there are none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quasar_trt.engines.base import Engine
from quasar_trt.errors import unknown
from quasar_trt.machine import usable_cpus
from quasar_trt.plugins import native
from quasar_trt.plugins.packing import pack_vector, pack_weight
from quasar_trt.tensorfile import float32_of, to_numpy

if TYPE_CHECKING:
    from torch import Tensor

_QUANTIZATIONS = ("int8", "none")


def check_quantization(value: object) -> None:
    """Raises QuasarError unless `value` can be the option of that name, which every head has."""
    if value not in _QUANTIZATIONS:
        raise unknown("quantization of a head", str(value), _QUANTIZATIONS)


class DraftLinears:
    """Makes the linears of a head beside an engine, whose native threads they share where it has such.

    quantization: "int8" for INT8 weights, one scale per output channel, which read 16-bit activations as an INT8 head of the
        model does; "none" for BF16 weights.
    pool: the native threads; None where numpy computes.
    """

    def __init__(self, engine: Engine, quantization: str):
        self._int8 = quantization == "int8"
        self.pool = None if native.UNAVAILABLE else getattr(engine, "pool", None) or native.thread_pool(usable_cpus())

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> DraftLinear:
        """weight: [out, in]; bias: [out]."""
        return DraftLinear(*self.stored(weight), None if bias is None else float32_of(bias), self.pool)

    def stored(self, weight: Tensor) -> tuple[np.ndarray, np.ndarray | None]:
        """A weight [out, in] as (INT8 codes, scale float32 [out]), or (uint16 bits of bfloat16, None)."""
        from quasar_trt.plugins.reference import quantize_8

        if not self._int8:
            return to_numpy(weight.bfloat16()), None
        codes, scale = quantize_8(weight)
        return codes.numpy(), scale.numpy()


class DraftLinear:
    """Made by `DraftLinears`."""

    def __init__(self, weight: np.ndarray, scale: np.ndarray | None, bias: np.ndarray | None, pool: object | None):
        self._out = len(weight)
        self._bias, self._pool = bias, pool
        if pool is None:
            self._weight = float32_of(weight) if scale is None else weight * scale[:, None]
        else:
            self._weight, self._scale = pack_weight(weight), None if scale is None else pack_vector(scale)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[rows, in] float32 -> [rows, out] float32."""
        if self._pool is None:
            y = x @ self._weight.T
        else:
            y = native.head_linear(x, self._weight, self._scale, self._out, self._pool)
        return y if self._bias is None else y + self._bias


def rms_norm(x: np.ndarray, weight: np.ndarray | float, epsilon: float) -> np.ndarray:
    """x [rows, n] float32, weight [n] float32 or one for all -> [rows, n] float32."""
    return x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + epsilon) * weight


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x), without overflow."""
    return x * (0.5 + 0.5 * np.tanh(0.5 * x))
