"""One table of cases for every implementation of the quantized operations, held to the torch reference."""

from __future__ import annotations

import math

import pytest
import torch
from implementations import IMPLEMENTATIONS, Implementation
from torch import Tensor

from quasar_trt.plugins import reference

BLOCKS = [(0, 50), (2, 50), (4, 20), (8, 24), (16, 80), (32, 96), (64, 576), (512, 1536)]  # columns of a block, k
SHAPES = [(1, 16, 16), (2, 48, 33), (3, 100, 80), (5, 576, 96), (8, 1030, 17), (13, 2, 5), (20, 40, 40)]  # rows, k, n
BITS = [(8, torch.int8), (16, torch.int16)]  # of an activation, and the dtype of its codes


@pytest.fixture(params=IMPLEMENTATIONS)
def run(request) -> Implementation:
    return IMPLEMENTATIONS[request.param]


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def positive(*shape: int, seed: int) -> Tensor:
    return normal(*shape, seed=seed).abs() + 0.1


def codes(*shape: int, seed: int, dtype: torch.dtype = torch.int8) -> Tensor:
    limit = torch.iinfo(dtype).max
    return torch.randint(-limit, limit + 1, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def smooth_quantize(k: int, dtype: torch.dtype, *options) -> tuple:
    return normal(6, k, seed=1).to(dtype), positive(k, seed=2), *options


def silu_mul_smooth_quantize(k: int, dtype: torch.dtype, *options) -> tuple:
    return normal(6, k, seed=3, scale=5).to(dtype), normal(6, k, seed=4).to(dtype), positive(k, seed=5), *options


def rms_norm_quantize(k: int, dtype: torch.dtype, *options) -> tuple:
    return normal(6, k, seed=6, scale=4).to(dtype), normal(k, seed=7).to(dtype), 1e-5, *options


def check_codes(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Scales up to the rounding of sums in another order, which may also flip a tie."""
    (q, scale), (expected_q, expected_scale) = found, expected
    assert q.dtype == expected_q.dtype and scale.dtype == torch.float32
    torch.testing.assert_close(scale, expected_scale, rtol=2e-6, atol=0)
    different = q.int() - expected_q.int()
    assert different.abs().max() <= 1
    if q.dtype == torch.int8:
        assert (different == 0).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activations", [8, 16])
@pytest.mark.parametrize(("block", "k"), BLOCKS)
@pytest.mark.parametrize("operation", [smooth_quantize, silu_mul_smooth_quantize])
def test_smoothed_rows_agree_with_the_reference(operation, block, k, activations, dtype, run):
    arguments = operation(k, dtype, block, activations)
    check_codes(run(operation.__name__, *arguments), getattr(reference, operation.__name__)(*arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activations", [8, 16])
@pytest.mark.parametrize("k", [1, 16, 50, 576])
def test_normed_rows_agree_with_the_reference(k, activations, dtype, run):
    arguments = rms_norm_quantize(k, dtype, activations)
    check_codes(run("rms_norm_quantize", *arguments), reference.rms_norm_quantize(*arguments))


@pytest.mark.parametrize("operation", [smooth_quantize, silu_mul_smooth_quantize, rms_norm_quantize])
def test_rows_wider_than_a_program_holds_at_once_agree_with_the_reference(operation, run):
    arguments = operation(9000, torch.float32, *([] if operation is rms_norm_quantize else [8]))
    check_codes(run(operation.__name__, *arguments), getattr(reference, operation.__name__)(*arguments))


@pytest.mark.parametrize(("bits", "dtype"), BITS)
def test_known_rows_have_known_codes(bits, dtype, run):
    limit = 2 ** (bits - 1) - 1
    halves = [limit, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]
    q, scale = run(f"quantize_{bits}", torch.tensor([halves, [0.0] * 7, [-3.0] * 7]))
    assert q.dtype == dtype
    assert q.tolist() == [[limit, 0, 2, 2, 0, -2, -2], [0] * 7, [-limit] * 7]
    torch.testing.assert_close(scale, torch.tensor([1.0, 1.0, 3 / limit]), rtol=1e-7, atol=0)


@pytest.mark.parametrize("bits", [8, 16])
def test_rows_too_small_for_a_normal_scale_count_as_zero(bits, run):
    q, scale = run(f"quantize_{bits}", torch.full((1, 16), 190 * 1.4e-45))
    assert (q == 0).all() and scale.tolist() == [1.0]


@pytest.mark.parametrize(("block", "k"), BLOCKS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_no_output_of_a_row_that_is_not_finite_is_finite_and_nan_stays_nan(value, block, k, run):
    x = normal(3, k, seed=8)
    x[1, k - 1] = value
    q, scale = run("smooth_quantize", x, torch.ones(k), block)
    assert scale.isfinite().tolist() == [True, False, True]
    y = run("w8a8_linear", q, scale, codes(16, k, seed=9), torch.ones(16))
    assert y.isfinite().all(dim=1).tolist() == y.isfinite().any(dim=1).tolist() == [True, False, True]
    if math.isnan(value):
        assert scale[1].isnan() and y[1].isnan().all()


@pytest.mark.parametrize(("bits", "dtype"), BITS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_linears_equal_the_reference(rows, k, n, with_bias, bits, dtype, run):
    arguments = codes(rows, k, seed=1, dtype=dtype), positive(rows, seed=2), codes(n, k, seed=3), positive(n, seed=4)
    bias = normal(n, seed=5) if with_bias else None
    y = run(f"w8a{bits}_linear", *arguments, bias)
    assert torch.equal(y, reference.LINEAR[bits](*arguments, bias))


@pytest.mark.parametrize(("bits", "dtype"), BITS)
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_extreme_codes_do_not_overflow(sign, bits, dtype, run):
    limit, k = torch.iinfo(dtype).max, 4096
    q, weight = torch.full((1, k), limit, dtype=dtype), torch.full((16, k), sign * 127, dtype=torch.int8)
    y = run(f"w8a{bits}_linear", q, torch.ones(1), weight, torch.ones(16))
    assert torch.equal(y, torch.full((1, 16), float(sign * k * limit * 127)))


@pytest.mark.parametrize(("bits", "dtype"), BITS)
def test_a_linear_gives_a_row_the_same_bits_alone_and_among_others(bits, dtype, run):
    q, scale, weight, weight_scale = (
        codes(20, 200, seed=1, dtype=dtype),
        positive(20, seed=2),
        codes(70, 200, seed=3),
        positive(70, seed=4),
    )
    alone = torch.cat(
        [run(f"w8a{bits}_linear", q[r : r + 1], scale[r : r + 1], weight, weight_scale) for r in range(20)]
    )
    for count in range(1, 21):
        assert torch.equal(run(f"w8a{bits}_linear", q[:count], scale[:count], weight, weight_scale), alone[:count])


@pytest.mark.parametrize("operation", [smooth_quantize, silu_mul_smooth_quantize, rms_norm_quantize])
def test_quantizing_gives_a_row_the_same_bits_alone_and_among_others(operation, run):
    *rows, vector, option = operation(576, torch.float32, *([] if operation is rms_norm_quantize else [64]))
    q, scale = run(operation.__name__, *rows, vector, option)
    for r in range(6):
        alone = run(operation.__name__, *(x[r : r + 1] for x in rows), vector, option)
        assert torch.equal(alone[0][0], q[r]) and alone[1][0] == scale[r]


@pytest.mark.parametrize(
    ("operation", "shapes", "message"),
    [
        ("w8a8_linear", [(2, 40), (1,), (16, 40), (16,)], "scale has shape"),
        ("w8a8_linear", [(2, 40), (2,), (16, 40), (5,)], "weight_scale has shape"),
        ("w8a8_linear", [(2, 40), (2,), (16, 40), (16,), (3,)], "bias has shape"),
        ("w8a8_linear", [(2, 30), (2,), (16, 40), (16,)], "30 columns"),
        ("silu_mul_smooth_quantize", [(1, 64), (1, 32), (64,)], "must be equal"),
        ("smooth_quantize", [(1, 64), (32,)], "inv_smoother has shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(operation, shapes, message, run):
    tensors = [torch.ones(shape) for shape in shapes]
    if operation == "w8a8_linear":
        tensors[0], tensors[2] = tensors[0].to(torch.int8), tensors[2].to(torch.int8)
    with pytest.raises(ValueError, match=message):
        run(operation, *tensors)


def test_norm_weights_of_another_length_are_refused(run):
    with pytest.raises(ValueError, match="weight has shape"):
        run("rms_norm_quantize", torch.ones(1, 64), torch.ones(16), 1e-5)


@pytest.mark.parametrize("block", [3, 32, -8])
def test_blocks_that_do_not_divide_the_row_are_refused(block, run):
    with pytest.raises(
        ValueError, match=f"block has {block} columns; allowed: a power of two that divides the input's 48"
    ):
        run("smooth_quantize", torch.ones(1, 48), torch.ones(48), block)
