"""What the native kernels alone promise: equal bits on every instruction set, the BF16 linear, how numpy arrays are read.

That they agree with the torch reference is tested in test_operations.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quasar_trt.plugins import native

ISAS = native.isa_names()
BLOCKS = [(2, 50), (4, 20), (8, 24), (16, 80), (32, 96), (64, 576), (512, 1536)]  # columns of a Hadamard block, k
SHAPES = [(1, 16, 16), (2, 48, 33), (3, 100, 80), (5, 576, 96), (8, 1030, 17), (13, 2, 5)]  # rows, k, n

pytestmark = pytest.mark.parametrize("isa", ISAS)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def codes(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-127, 128, shape).astype(np.int8)


def bf16_bits(array: np.ndarray) -> np.ndarray:
    return torch.from_numpy(array).bfloat16().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_bf16_linear_agrees_with_float64(rows, k, n, isa):
    x, weight = random(rows, k, seed=1), bf16_bits(random(n, k, seed=2))
    exact = x.astype(np.float64) @ (weight.astype(np.uint32) << 16).view(np.float32).astype(np.float64).T
    # float32 rounding of a sum of k terms
    np.testing.assert_allclose(native.bf16_linear(x, weight, isa=isa), exact, rtol=0, atol=1e-6 * k)


def test_strided_and_half_precision_vectors_are_read_right(isa):
    q, weight, scales = codes(700, 40), codes(16, 40), np.abs(random(1400))
    expected = native.w8a8_linear(q, scales[::2].copy(), weight, np.full(16, 0.5, np.float32), isa=isa)
    found = native.w8a8_linear(q, scales[::2], weight, np.full(16, 0.5, np.float16), isa=isa)
    np.testing.assert_array_equal(found, expected)


def test_bf16_linear_gives_a_row_the_same_bits_alone_and_among_others(isa):
    x, weight = random(16, 200), bf16_bits(random(70, 200, seed=1))
    alone = np.concatenate([native.bf16_linear(x[r : r + 1], weight, isa=isa) for r in range(16)])
    for count in range(1, 17):
        np.testing.assert_array_equal(native.bf16_linear(x[:count], weight, isa=isa), alone[:count])


@pytest.mark.parametrize("k", [16, 50, 576])
def test_every_instruction_set_gives_the_bits_of_the_portable_one(k, isa):
    x, weight = random(5, k, scale=3), random(k, seed=1)
    matrix = bf16_bits(random(40, k, seed=2))
    for mine, portable in [
        (native.rms_norm(x, weight, 1e-5, isa=isa), native.rms_norm(x, weight, 1e-5, isa="portable")),
        (native.bf16_linear(x, matrix, isa=isa), native.bf16_linear(x, matrix, isa="portable")),
        *zip(
            native.silu_mul_smooth_quantize(x, x[::-1].copy(), weight, isa=isa),
            native.silu_mul_smooth_quantize(x, x[::-1].copy(), weight, isa="portable"),
            strict=True,
        ),
    ]:
        np.testing.assert_array_equal(mine, portable)


@pytest.mark.parametrize(("block", "k"), BLOCKS)
def test_every_instruction_set_transforms_to_the_bits_of_the_portable_one(block, k, isa):
    x, inv_smoother = random(5, k, scale=3), np.abs(random(k, seed=1)) + 0.1
    for activations in (8, 16):
        mine = native.smooth_quantize(x, inv_smoother, block, activations, isa=isa)
        portable = native.smooth_quantize(x, inv_smoother, block, activations, isa="portable")
        np.testing.assert_array_equal(mine[0], portable[0])
        np.testing.assert_array_equal(mine[1], portable[1])
