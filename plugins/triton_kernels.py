"""The quantized operations as Triton kernels.

Every kernel takes pointers to its inputs, then int32 scalars, then pointers to its outputs: the order in which TensorRT
passes them. What a model fixes (k, n, Hadamard blocks, eps) is constant at compile time. A program of a quantizing kernel has
one row, a program of the linear one tile of the output.

Arithmetic follows `quasar_trt.plugins.reference`: divisions and roots are correctly rounded, and launches turn the fusing
of multiplications and additions off.
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALLEST_NORMAL = tl.constexpr(2.0**-126)
# Adding it to a float32 of magnitude below 2^22 leaves no bits after the point, rounded half to even.
ROUNDER = tl.constexpr(1.5 * 2.0**23)


@triton.constexpr_function
def _log2(size):
    return size.bit_length() - 1


@triton.jit
def _read(pointer, columns, K: tl.constexpr):
    return tl.load(pointer + columns, mask=columns < K, other=0.0).to(tl.float32)


@triton.jit
def _hadamard(y, HADAMARD: tl.constexpr, WIDTH: tl.constexpr):
    """Blocks of HADAMARD values of y [WIDTH] times the orthonormal Hadamard matrix.

    Each stage adds and subtracts neighbours and moves the bit that told them apart to the top of the index, so that after
    log2(HADAMARD) stages every bit is back in its place.
    """
    for _ in tl.static_range(_log2(HADAMARD)):
        even, odd = tl.split(tl.reshape(y, [WIDTH // HADAMARD, HADAMARD // 2, 2]))
        y = tl.permute(tl.join(even + odd, even - odd), [0, 2, 1])
    return tl.reshape(y, [WIDTH]) * (HADAMARD**-0.5)


@triton.jit
def _values(x, up, factor, vector, columns, K: tl.constexpr, WIDTH: tl.constexpr, HADAMARD: tl.constexpr):
    """WIDTH values of the row that is quantized, zero from column K on; what is None is left out."""
    y = _read(x, columns, K)
    if up is not None:
        y = tl.div_rn(y, 1.0 + tl.exp(-y)) * _read(up, columns, K)
    if factor is not None:
        y *= factor
    if vector is not None:
        y *= _read(vector, columns, K)
    if HADAMARD:
        y = _hadamard(y, HADAMARD, WIDTH)
    return y


@triton.jit
def _largest(y):
    """Bits of the largest magnitude. Magnitudes are ordered like their bits, where NaN lies above infinity: it is the largest."""
    return tl.max(tl.abs(y).to(tl.int32, bitcast=True), axis=0)


@triton.jit
def _store_codes(y, row_scale, columns, q, K: tl.constexpr):
    codes = (tl.div_rn(y, row_scale) + ROUNDER) - ROUNDER  # no clamp: two roundings cannot leave the range
    codes = tl.where(row_scale < float("inf"), codes, 0.0)  # what an integer makes of NaN is not defined
    tl.store(q + columns, codes.to(q.dtype.element_ty), mask=columns < K)


@triton.jit
def _quantize_row(
    x,
    up,
    factor,
    vector,
    q,
    scale,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    HADAMARD: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """One row; its first WIDTH values stay in registers, what is left of a wider one is read twice."""
    columns = tl.arange(0, WIDTH)
    y = _values(x, up, factor, vector, columns, K, WIDTH, HADAMARD)
    largest = _largest(y)
    for start in range(WIDTH, K, WIDTH):
        more = _values(x, up, factor, vector, start + columns, K, WIDTH, HADAMARD)
        largest = tl.maximum(largest, _largest(more))
    magnitude = largest.to(tl.float32, bitcast=True)
    row_scale = tl.where(magnitude < LIMIT * SMALLEST_NORMAL, 1.0, tl.div_rn(magnitude, LIMIT * 1.0))
    tl.store(scale, row_scale)
    _store_codes(y, row_scale, columns, q, K)
    for start in range(WIDTH, K, WIDTH):
        more = _values(x, up, factor, vector, start + columns, K, WIDTH, HADAMARD)
        _store_codes(more, row_scale, start + columns, q, K)


@triton.jit
def smooth_quantize(
    x, inv_smoother, q, scale, K: tl.constexpr, WIDTH: tl.constexpr, HADAMARD: tl.constexpr, LIMIT: tl.constexpr
):
    """x [rows, K] bf16 or f32, inv_smoother [K] f32 or None -> q [rows, K] int8 or int16, scale [rows] f32."""
    row = tl.program_id(0).to(tl.int64)
    _quantize_row(x + row * K, None, None, inv_smoother, q + row * K, scale + row, K, WIDTH, HADAMARD, LIMIT)


@triton.jit
def silu_mul_smooth_quantize(
    gate, up, inv_smoother, q, scale, K: tl.constexpr, WIDTH: tl.constexpr, HADAMARD: tl.constexpr, LIMIT: tl.constexpr
):
    """As `smooth_quantize` of silu(gate) * up; gate and up [rows, K] bf16 or f32."""
    row = tl.program_id(0).to(tl.int64)
    _quantize_row(gate + row * K, up + row * K, None, inv_smoother, q + row * K, scale + row, K, WIDTH, HADAMARD, LIMIT)


@triton.jit
def rms_norm_quantize(
    x, weight, q, scale, K: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr, LIMIT: tl.constexpr
):
    """x [rows, K] and weight [K], bf16 or f32 -> q [rows, K] int8 or int16, scale [rows] f32."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    y = _read(x + row * K, columns, K)
    total = tl.sum(y * y, axis=0)
    for start in range(WIDTH, K, WIDTH):
        y = _read(x + row * K, start + columns, K)
        total += tl.sum(y * y, axis=0)
    factor = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(total, K * 1.0) + EPS))
    _quantize_row(x + row * K, None, factor, weight, q + row * K, scale + row, K, WIDTH, 0, LIMIT)


@triton.jit(do_not_specialize=["rows"])
def linear(
    q,
    scale,
    weight,
    weight_scale,
    bias,
    rows,
    y,
    N: tl.constexpr,
    K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """q [rows, K] int8 or int16, scale [rows] f32, weight [N, K] int8, weight_scale [N] f32, bias [N] or None -> y [rows, N] bf16 or f32.

    Tiles of the same weights follow each other, so weights come from memory once and q from the cache. The sums are exact:
    int16 codes are 256 * high + low + 128 with int8 high and low, each summed in int32 (K up to 2^17).
    """
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    channel = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    q_row = q + row.to(tl.int64)[:, None] * K
    weight_row = weight + channel.to(tl.int64)[:, None] * K
    WIDE: tl.constexpr = q.dtype.element_ty == tl.int16
    total = tl.zeros((TILE_ROWS, TILE_N), tl.int32)
    low_total = tl.zeros((TILE_ROWS, TILE_N), tl.int32)
    ones_total = tl.zeros((TILE_ROWS, TILE_N), tl.int32)
    for start in range(0, K, TILE_K):
        column = start + tl.arange(0, TILE_K)[None, :]
        codes = tl.load(q_row + column, mask=(row[:, None] < rows) & (column < K), other=0)
        w = tl.load(weight_row + column, mask=(channel[:, None] < N) & (column < K), other=0).T
        if WIDE:
            total = tl.dot((codes >> 8).to(tl.int8), w, total, out_dtype=tl.int32)
            low_total = tl.dot(((codes & 255) - 128).to(tl.int8), w, low_total, out_dtype=tl.int32)
            ones_total = tl.dot(tl.full((TILE_ROWS, TILE_K), 1, tl.int8), w, ones_total, out_dtype=tl.int32)
        else:
            total = tl.dot(codes, w, total, out_dtype=tl.int32)
    if WIDE:
        total = total.to(tl.int64) * 256 + low_total + ones_total.to(tl.int64) * 128
    out = total.to(tl.float32) * tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
    out *= tl.load(weight_scale + channel, mask=channel < N, other=0.0)[None, :]
    if bias is not None:
        out += tl.load(bias + channel, mask=channel < N, other=0.0).to(tl.float32)[None, :]
    inside = (row[:, None] < rows) & (channel[None, :] < N)
    tl.store(y + row.to(tl.int64)[:, None] * N + channel[None, :], out.to(y.dtype.element_ty), mask=inside)
