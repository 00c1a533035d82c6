"""The native kernels against the torch reference, on every instruction set that runs here, and against each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quasar_trt.plugins import native, reference

ISAS = native.isa_names()
BLOCKS = [(2, 50), (4, 20), (8, 24), (16, 80), (32, 96), (64, 576), (512, 1536)]  # columns of a Hadamard block, k
SHAPES = [(1, 16, 16), (2, 48, 33), (3, 100, 80), (5, 576, 96), (8, 1030, 17), (13, 2, 5)]  # rows, k, n

pytestmark = pytest.mark.parametrize("isa", ISAS)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def codes(*shape: int, seed: int = 0, limit: int = 127, dtype=np.int8) -> np.ndarray:
    return np.random.default_rng(seed).integers(-limit, limit + 1, shape).astype(dtype)


def to_torch(*arrays):
    return [None if array is None else torch.from_numpy(array) for array in arrays]


def bf16_bits(array: np.ndarray) -> np.ndarray:
    return torch.from_numpy(array).bfloat16().view(torch.int16).numpy().view(np.uint16)


OPERATIONS = {
    "smooth_quantize": lambda k: (random(6, k, seed=1), np.abs(random(k, seed=2)) + 0.1),
    "rms_norm_quantize": lambda k: (random(6, k, seed=3, scale=4), random(k, seed=4), 1e-5),
    "silu_mul_smooth_quantize": lambda k: (
        random(6, k, seed=5, scale=5),
        random(6, k, seed=6),
        np.abs(random(k, seed=7)) + 0.1,
    ),
    "quantize_16": lambda k: (random(6, k, seed=8),),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("k", [16, 50, 576])
def test_quantizing_operations_agree_with_the_reference(name, k, isa):
    arguments = OPERATIONS[name](k)
    q, scale = getattr(native, name)(*arguments, isa=isa)
    expected_q, expected_scale = getattr(reference, name)(
        *[torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in arguments]
    )
    np.testing.assert_allclose(scale, expected_scale.numpy(), rtol=1e-6)
    # a sum in another order may flip a tie
    assert np.abs(q.astype(int) - expected_q.numpy().astype(int)).max() <= 1
    assert (q == expected_q.numpy()).mean() > 0.99


@pytest.mark.parametrize("activations", [8, 16])
@pytest.mark.parametrize(("block", "k"), [(0, 50), *BLOCKS])
@pytest.mark.parametrize("name", ["smooth_quantize", "silu_mul_smooth_quantize"])
def test_smoothed_and_transformed_rows_agree_with_the_reference(name, block, k, activations, isa):
    arguments = OPERATIONS[name](k)
    q, scale = getattr(native, name)(*arguments, block, activations, isa=isa)
    expected_q, expected_scale = getattr(reference, name)(*to_torch(*arguments), block, activations)
    assert q.dtype == expected_q.numpy().dtype
    np.testing.assert_allclose(scale, expected_scale.numpy(), rtol=2e-6)  # sums of up to 512 values in another order
    # a sum in another order may flip a tie
    assert np.abs(q.astype(int) - expected_q.numpy().astype(int)).max() <= 1
    if activations == 8:
        assert (q == expected_q.numpy()).mean() > 0.99


@pytest.mark.parametrize(("block", "k"), BLOCKS)
def test_a_nan_makes_its_transformed_row_nan_and_no_other(block, k, isa):
    x = random(3, k)
    x[1, k - 1] = np.nan
    _, scale = native.smooth_quantize(x, np.ones(k, np.float32), block, isa=isa)
    assert np.isnan(scale).tolist() == [False, True, False]


@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_w8a8_linear_equals_the_reference(rows, k, n, with_bias, isa):
    q, weight = codes(rows, k, seed=1), codes(n, k, seed=2)
    scale, weight_scale = np.abs(random(rows, seed=3)), np.abs(random(n, seed=4))
    bias = random(n, seed=5) if with_bias else None
    expected = reference.w8a8_linear(*to_torch(q, scale, weight, weight_scale, bias))
    np.testing.assert_array_equal(native.w8a8_linear(q, scale, weight, weight_scale, bias, isa=isa), expected.numpy())


@pytest.mark.parametrize("sign", [1, -1])
def test_w8a8_sums_of_extreme_codes_do_not_overflow(sign, isa):
    q, weight = np.full((1, 4096), 127, np.int8), np.full((16, 4096), sign * 127, np.int8)
    y = native.w8a8_linear(q, np.ones(1, np.float32), weight, np.ones(16, np.float32), isa=isa)
    assert (y == sign * 4096 * 127 * 127).all()


@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_w8a16_linear_equals_the_reference(rows, k, n, isa):
    q, weight = codes(rows, k, seed=1, limit=32767, dtype=np.int16), codes(n, k, seed=2)
    scale, weight_scale = np.abs(random(rows, seed=3)), np.abs(random(n, seed=4))
    expected = reference.w8a16_linear(*to_torch(q, scale, weight, weight_scale))
    np.testing.assert_array_equal(native.w8a16_linear(q, scale, weight, weight_scale, isa=isa), expected.numpy())


@pytest.mark.parametrize("sign", [1, -1])
def test_w8a16_sums_of_extreme_codes_do_not_overflow(sign, isa):
    q, weight = np.full((1, 2048), 32767, np.int16), np.full((16, 2048), sign * 127, np.int8)
    y = native.w8a16_linear(q, np.ones(1, np.float32), weight, np.ones(16, np.float32), isa=isa)
    assert (y == np.float32(sign * 2048 * 32767 * 127)).all()


@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_bf16_linear_agrees_with_float64(rows, k, n, isa):
    x, weight = random(rows, k, seed=1), bf16_bits(random(n, k, seed=2))
    exact = x.astype(np.float64) @ (weight.astype(np.uint32) << 16).view(np.float32).astype(np.float64).T
    # float32 rounding of a sum of k terms
    np.testing.assert_allclose(native.bf16_linear(x, weight, isa=isa), exact, rtol=0, atol=1e-6 * k)


def test_quantizing_known_rows_gives_the_known_codes(isa):
    x = np.zeros((3, 20), np.float32)
    x[0, :4] = [-1, 0.999, 0, 0.5]
    x[2] = -3.0
    q, scale = native.quantize_8(x, isa=isa)
    np.testing.assert_array_equal(q[0, :4], [-127, 127, 0, 64])  # 63.5 goes to the even 64
    np.testing.assert_allclose(scale, [1 / 127, 1.0, 3 / 127], rtol=1e-7)
    assert (q[1] == 0).all()
    assert (q[2] == -127).all()


def test_a_nan_makes_its_row_nan_and_no_other(isa):
    x = random(3, 40)
    x[1, 7] = np.nan
    q, scale = native.quantize_8(x, isa=isa)
    assert np.isnan(scale).tolist() == [False, True, False]
    y = native.w8a8_linear(q, scale, codes(16, 40), np.ones(16, np.float32), isa=isa)
    assert np.isnan(y).all(axis=1).tolist() == [False, True, False]


def test_rows_too_small_for_a_normal_scale_count_as_zero(isa):
    x = np.full((1, 16), 190 * 1.4e-45, np.float32)
    for quantize, reference_quantize in [
        (native.quantize_8, reference.quantize_8),
        (native.quantize_16, reference.quantize_16),
    ]:
        q, scale = quantize(x, isa=isa)
        assert (q == 0).all() and scale[0] == 1
        expected_q, expected_scale = reference_quantize(torch.from_numpy(x))
        assert (expected_q == 0).all() and expected_scale[0] == 1


def test_the_reference_gives_nan_rows_too(isa):
    x = random(3, 40)
    x[1, 7] = np.nan
    _, expected = reference.quantize_8(torch.from_numpy(x))
    np.testing.assert_allclose(native.quantize_8(x, isa=isa)[1], expected.numpy(), rtol=1e-6, equal_nan=True)


def test_vectors_of_the_wrong_length_are_refused(isa):
    q, weight, ones = codes(2, 40), codes(16, 40), np.ones(16, np.float32)
    for arguments, message in [
        ((q, ones[:1], weight, ones), "scale has shape"),
        ((q, ones[:2], weight, ones[:5]), "weight_scale has shape"),
        ((q, ones[:2], weight, ones, ones[:3]), "bias has shape"),
        ((q[:, :30], ones[:2], weight, ones), "30 columns"),
    ]:
        with pytest.raises(ValueError, match=message):
            native.w8a8_linear(*arguments, isa=isa)
    with pytest.raises(ValueError, match="weight has shape"):
        native.rms_norm(random(1, 64), ones, 1e-5, isa=isa)
    with pytest.raises(ValueError, match="must be equal"):
        native.silu_mul_smooth_quantize(random(1, 64), random(1, 32), random(64), isa=isa)
    with pytest.raises(ValueError, match="inv_smoother has shape"):
        native.smooth_quantize(random(1, 64), random(32), isa=isa)


@pytest.mark.parametrize("block", [3, 32, -8])
def test_blocks_that_do_not_divide_the_row_are_refused(block, isa):
    with pytest.raises(
        ValueError, match=f"block has {block} columns; allowed: a power of two that divides the input's 48"
    ):
        native.smooth_quantize(random(1, 48), random(48), block, isa=isa)


def test_strided_and_half_precision_vectors_are_read_right(isa):
    q, weight, scales = codes(700, 40), codes(16, 40), np.abs(random(1400))
    expected = native.w8a8_linear(q, scales[::2].copy(), weight, np.full(16, 0.5, np.float32), isa=isa)
    found = native.w8a8_linear(q, scales[::2], weight, np.full(16, 0.5, np.float16), isa=isa)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["w8a8", "w8a16", "bf16"])
def test_a_row_has_the_same_bits_alone_and_among_others(kind, isa):
    k, n = 200, 70
    scale, weight_scale = np.abs(random(16, seed=3)), np.abs(random(n, seed=4))
    if kind == "bf16":
        x, weight = random(16, k), bf16_bits(random(n, k, seed=1))

        def run(rows):
            return native.bf16_linear(x[rows], weight, isa=isa)

    else:
        x = codes(16, k) if kind == "w8a8" else codes(16, k, limit=32767, dtype=np.int16)
        linear, weight = getattr(native, f"{kind}_linear"), codes(n, k, seed=1)

        def run(rows):
            return linear(x[rows], scale[rows], weight, weight_scale, isa=isa)

    alone = np.concatenate([run(slice(r, r + 1)) for r in range(16)])
    for count in range(1, 17):
        np.testing.assert_array_equal(run(slice(0, count)), alone[:count])


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
