"""The quantized operations on CUDA tensors, with the signatures of `quasar_trt.plugins.reference`.

Under TRITON_INTERPRET=1, set before Triton is imported, they run on CPU tensors, slowly. Sizes are checked here, because the
kernels trust them; a mismatch raises ValueError.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quasar_trt.plugins import triton_launch
from quasar_trt.plugins.triton_launch import TILES, Launch

_CODES = {8: torch.int8, 16: torch.int16}


def _run(launch: Launch, grid: tuple[int, ...], *arguments: Tensor | int | None) -> None:
    device = arguments[0].device
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(f"the input is on {device}; Triton's kernels run on a CUDA device")
    contiguous = [a.contiguous() if isinstance(a, Tensor) else a for a in arguments]
    constants = {name: value for name, value in launch.constants if value is not None}  # None is among the arguments
    launch.kernel[grid](*contiguous, **constants, **launch.options)


def _vector(vector: Tensor | None, size: int, what: str) -> Tensor | None:
    if vector is not None and vector.shape != (size,):
        raise ValueError(f"{what} has shape {tuple(vector.shape)}; expected ({size},)")
    return vector


def _quantize(launch: Launch, activations: int, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    x = inputs[0]
    q = torch.empty(x.shape, dtype=_CODES[activations], device=x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    _run(launch, (len(x),), *inputs, q, scale)
    return q, scale


def quantize_8(y: Tensor) -> tuple[Tensor, Tensor]:
    """y [rows, k] bf16 or f32 -> (q int8 [rows, k], scale float32 [rows])."""
    return smooth_quantize(y, None)


def quantize_16(y: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantize_8` with q int16."""
    return smooth_quantize(y, None, activations=16)


QUANTIZE = {8: quantize_8, 16: quantize_16}


def smooth_quantize(
    x: Tensor, inv_smoother: Tensor | None, hadamard: int = 0, activations: int = 8
) -> tuple[Tensor, Tensor]:
    """x [rows, k] bf16 or f32, inv_smoother [k] f32 or None for no smoothing; blocks of up to 4096 columns."""
    k = x.shape[1]
    launch = triton_launch.smooth_quantize(k, inv_smoother is not None, hadamard, activations)
    return _quantize(launch, activations, x, _vector(inv_smoother, k, "inv_smoother"))


def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float, activations: int = 8) -> tuple[Tensor, Tensor]:
    """x [rows, k] and weight [k], bf16 or f32."""
    k = x.shape[1]
    launch = triton_launch.rms_norm_quantize(k, eps, activations)
    return _quantize(launch, activations, x, _vector(weight, k, "weight"))


def silu_mul_smooth_quantize(
    gate: Tensor, up: Tensor, inv_smoother: Tensor, hadamard: int = 0, activations: int = 8
) -> tuple[Tensor, Tensor]:
    """gate and up [rows, k] bf16 or f32, inv_smoother [k] f32."""
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}; they must be equal")
    k = gate.shape[1]
    launch = triton_launch.silu_mul_smooth_quantize(k, hadamard, activations)
    return _quantize(launch, activations, gate, up, _vector(inv_smoother, k, "inv_smoother"))


def linear(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    tile: int | None = None,
) -> Tensor:
    """q int8 or int16 [rows, k], scale f32 [rows], weight int8 [n, k], weight_scale f32 [n], bias [n] -> y [rows, n] of `dtype`.

    dtype: bf16 or f32. tile: a key of `triton_launch.TILES`, by default that for so many rows; no bit depends on it.
    """
    (rows, columns), (n, k) = q.shape, weight.shape
    if columns != k:
        raise ValueError(f"the input has {columns} columns, the weight {k}; they must be equal")
    vectors = _vector(weight_scale, n, "weight_scale"), _vector(bias, n, "bias")
    tile = tile or triton_launch.tile_rows(rows)
    y = torch.empty(rows, n, dtype=dtype, device=q.device)
    launch = triton_launch.linear(n, k, 8 * q.element_size(), bias is not None, tile)
    grid = triton.cdiv(rows, tile), triton.cdiv(n, TILES[tile].channels)
    _run(launch, grid, q, _vector(scale, rows, "scale"), weight, *vectors, rows, y)
    return y


w8a8_linear = w8a16_linear = linear  # which of the two it is, the dtype of the codes tells
LINEAR = {8: w8a8_linear, 16: w8a16_linear}
