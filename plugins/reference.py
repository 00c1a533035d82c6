"""The quantized operations in plain torch: the contract that every kernel is held to.

All arithmetic is float32 around exact integer sums. Scales are per row (per token) or fixed, never computed from several rows:
a rejected draft row must not change an accepted one. An all-zero row has the scale 1.0, rounding is half to even, and codes are
symmetric (-128 never appears, but for a fixed scale). A row so small that its scale would be subnormal counts as zero; NaN makes its row NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

# float32 adds integers exactly below 2^24, and 1024 * 128 * 127 is less: one block of columns at a time is exact.
_EXACT_COLUMNS = 1024
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def _quantize(y: Tensor, limit: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    y = y.float()
    largest = y.abs().amax(dim=-1)
    scale = torch.where(largest < limit * _SMALLEST_NORMAL, torch.ones_like(largest), largest / limit)
    codes = torch.round(y / scale[:, None]).clamp(-limit, limit)
    return codes.to(dtype), scale


def quantize_8(y: Tensor) -> tuple[Tensor, Tensor]:
    """y [rows, k] -> (q int8 [rows, k], scale float32 [rows]) with scale = max|y| / 127, q = round(y / scale)."""
    return _quantize(y, 127, torch.int8)


def quantize_16(y: Tensor) -> tuple[Tensor, Tensor]:
    """y [rows, k] -> (q int16 [rows, k], scale float32 [rows]) with scale = max|y| / 32767, q = round(y / scale)."""
    return _quantize(y, 32767, torch.int16)


def quantize_static(y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """y [rows, k], scale float32 [1] -> (q int8 [rows, k], scale float32 [rows]) with q = round(y / scale), clipped to -128 .. 127
    as TensorRT's Quantize does."""
    codes = torch.round(y.float() / scale).clamp(-128, 127)
    return codes.to(torch.int8), scale.expand(len(y))


QUANTIZE = {8: quantize_8, 16: quantize_16}  # bits of an activation -> its quantization


def hadamard_matrix(size: int) -> Tensor:
    """The orthonormal Hadamard matrix of Sylvester's construction, float32 [size, size]; size is a power of two."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard block has {size} columns; allowed: a power of two")
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return matrix / math.sqrt(size)


def hadamard(x: Tensor, size: int) -> Tensor:
    """Each block of `size` columns of x times `hadamard_matrix(size)`, float32; x [rows, k], k a multiple of size."""
    blocks = x.float().reshape(len(x), -1, size)
    return (blocks @ hadamard_matrix(size).to(x.device)).reshape(x.shape)


def smooth(x: Tensor, inv_smoother: Tensor, block: int = 0) -> Tensor:
    """x * inv_smoother, float32 [rows, k], then `hadamard` in blocks of `block` columns (0: none)."""
    y = x.float() * inv_smoother
    return hadamard(y, block) if block else y


def smooth_quantize(x: Tensor, inv_smoother: Tensor, hadamard: int = 0, activations: int = 8) -> tuple[Tensor, Tensor]:
    """`quantize_8`, or with 16-bit `activations` `quantize_16`, of `smooth` in blocks of `hadamard` columns.

    x [rows, k] bfloat16 or float32, inv_smoother [k] float32.
    """
    return QUANTIZE[activations](smooth(x, inv_smoother, hadamard))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, float32 [..., k] (RMSNorm, arXiv 1910.07467). x [..., k], weight [k]."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()


def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float, activations: int = 8) -> tuple[Tensor, Tensor]:
    """`quantize_8`, or with 16-bit `activations` `quantize_16`, of `rms_norm`; the weight already carries the smoother."""
    return QUANTIZE[activations](rms_norm(x, weight, eps))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, float32 [rows, k], with silu(g) = g / (1 + exp(-g))."""
    return functional.silu(gate.float()) * up.float()


def silu_mul_smooth_quantize(
    gate: Tensor, up: Tensor, inv_smoother: Tensor, hadamard: int = 0, activations: int = 8
) -> tuple[Tensor, Tensor]:
    """`smooth_quantize` of `silu_mul`. gate and up [rows, k], inv_smoother [k] float32."""
    return smooth_quantize(silu_mul(gate, up), inv_smoother, hadamard, activations)


def _rescale(total: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    y = total.float() * scale[:, None] * weight_scale
    return y if bias is None else y + bias.float()


def w8a8_linear(q: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """y[r, n] = (sum_k q[r, k] * weight[n, k]) * scale[r] * weight_scale[n] (+ bias[n]), the sum exact.

    q int8 [rows, k], scale float32 [rows], weight int8 [n, k], weight_scale float32 [n], bias [n]; y float32 [rows, n].
    """
    total = torch.zeros(len(q), len(weight), dtype=torch.int32, device=q.device)
    for start in range(0, q.shape[1], _EXACT_COLUMNS):
        columns = slice(start, start + _EXACT_COLUMNS)
        total += (q[:, columns].float() @ weight[:, columns].float().T).int()
    return _rescale(total, scale, weight_scale, bias)


def w8a16_linear(q: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `w8a8_linear` with q int16: int32 would overflow, float64 keeps these sums exact."""
    return _rescale(q.double() @ weight.double().T, scale, weight_scale, bias)


LINEAR = {8: w8a8_linear, 16: w8a16_linear}  # bits of an activation -> the linear that reads its codes
