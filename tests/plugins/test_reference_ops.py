"""The torch operations against values worked out by hand and against plain integer arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quasar_trt.plugins import reference as ops


def rows(*values):
    return torch.tensor(values, dtype=torch.float32)


def test_a_row_is_scaled_by_its_largest_magnitude_and_rounded_half_to_even():
    q, scale = ops.quantize_8(rows([-1.0, 0.999, 0.0, 0.5]))
    assert q.dtype == torch.int8 and scale.dtype == torch.float32
    assert scale.tolist() == pytest.approx([1 / 127], rel=1e-7)
    assert q.tolist() == [[-127, 127, 0, 64]]


def test_halves_go_to_the_even_code():
    q, scale = ops.quantize_8(rows([127.0, 0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5]))
    assert scale.item() == 1.0
    assert q.tolist() == [[127, 0, 2, 2, 4, 0, -2, -2]]


def test_a_row_of_zeros_has_scale_one_and_codes_zero():
    q, scale = ops.quantize_8(rows([0.0, 0.0, 0.0], [3.0, 0.0, -1.5]))
    assert scale[0].item() == 1.0
    assert q[0].tolist() == [0, 0, 0]
    assert q[1].tolist() == [127, 0, -64]


@pytest.mark.parametrize("largest", [1e-30, 0.1, 1 / 3, 1.0, 12345.678, 3e38])
def test_a_row_of_negatives_never_reaches_minus_128(largest):
    q, scale = ops.quantize_8(rows([-largest, -largest / 2, -largest]))
    assert q[0, 0].item() == -127 and q.min().item() == -127
    assert math.isfinite(scale.item()) and scale.item() > 0


def test_scales_belong_to_one_row_each():
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    loud = torch.cat([x, 500 * x[:1]])
    alone, together = ops.quantize_8(x), ops.quantize_8(loud)
    assert torch.equal(alone[0], together[0][:3]) and torch.equal(alone[1], together[1][:3])


def test_sixteen_bit_codes_span_32767():
    q, scale = ops.quantize_16(rows([-2.0, 1.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0]))
    assert q.dtype == torch.int16
    assert scale.tolist() == pytest.approx([2 / 32767, 1.0], rel=1e-7)
    assert q.tolist() == [[-32767, 16384, 0, 32767], [0, 0, 0, 0]]


def test_smoothing_multiplies_by_the_inverse_smoother_before_the_maximum_is_taken():
    q, scale = ops.smooth_quantize(rows([2.0, -4.0, 100.0]), torch.tensor([1.0, 0.5, 0.01]))
    assert scale.item() == pytest.approx(2 / 127, rel=1e-7)
    assert q.tolist() == [[127, -127, 64]]


def test_a_hadamard_block_holds_the_signed_sums_of_its_columns():
    y = ops.hadamard(rows([1.0, 2.0, 3.0, 4.0, 10.0, 0.0, 0.0, 0.0]), 4)
    assert y.tolist() == [[5.0, -1.0, -2.0, 0.0, 5.0, 5.0, 5.0, 5.0]]


@pytest.mark.parametrize("size", [2, 8, 16, 512])
def test_hadamard_matrices_are_symmetric_orthonormal_and_of_the_parity_of_common_bits(size):
    matrix = ops.hadamard_matrix(size)
    parity = torch.tensor([[(i & j).bit_count() % 2 for j in range(size)] for i in range(size)])
    torch.testing.assert_close(matrix, (1.0 - 2.0 * parity) / math.sqrt(size), rtol=1e-6, atol=0)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [0, 3, 24])
def test_hadamard_blocks_that_are_no_power_of_two_are_refused(size):
    with pytest.raises(ValueError, match=f"{size} columns; allowed: a power of two"):
        ops.hadamard_matrix(size)


@pytest.mark.parametrize("activations", [8, 16])
def test_the_transform_follows_the_smoothing_and_comes_before_the_maximum(activations):
    q, scale = ops.smooth_quantize(rows([2.0, 4.0, 30.0, 0.0]), torch.tensor([1.0, 0.5, 0.1, 1.0]), 2, activations)
    limit = 2 ** (activations - 1) - 1
    assert scale.item() == pytest.approx(4 / math.sqrt(2) / limit, rel=1e-6)
    assert q.tolist() == [[limit, 0, round(limit * 3 / 4), round(limit * 3 / 4)]]


def test_bfloat16_input_is_quantized_as_its_float32_value():
    x = torch.randn(4, 33, generator=torch.Generator().manual_seed(1)).bfloat16()
    inv_smoother = torch.rand(33, generator=torch.Generator().manual_seed(2)) + 0.5
    from_bf16, from_f32 = ops.smooth_quantize(x, inv_smoother), ops.smooth_quantize(x.float(), inv_smoother)
    assert torch.equal(from_bf16[0], from_f32[0]) and torch.equal(from_bf16[1], from_f32[1])


def test_rms_norm_divides_by_the_root_mean_square():
    y = ops.rms_norm(rows([3.0, -4.0], [0.0, 0.0]), torch.tensor([2.0, 1.0]), eps=1e-5)
    root = math.sqrt(12.5 + 1e-5)
    assert y.tolist()[0] == pytest.approx([6 / root, -4 / root], rel=1e-6)
    assert y.tolist()[1] == [0.0, 0.0]


def test_eps_acts_inside_the_root():
    y = ops.rms_norm(rows([1e-3, 1e-3]), torch.ones(2), eps=3e-6)
    assert y.tolist()[0] == pytest.approx([0.5, 0.5], rel=1e-6)


def test_rms_norm_quantize_quantizes_the_norm():
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(3))
    weight = torch.rand(24, generator=torch.Generator().manual_seed(4)).bfloat16()
    q, scale = ops.rms_norm_quantize(x, weight, 1e-5)
    y = ops.rms_norm(x, weight, 1e-5)
    assert scale.tolist() == pytest.approx((y.abs().amax(1) / 127).tolist(), rel=1e-6)
    assert (q * scale[:, None] - y).abs().max() <= 0.5001 * scale.max()


def test_silu_is_the_gate_times_its_sigmoid():
    gate, up = rows([1.0, -1.0, 0.0, -200.0, 200.0]), rows([2.0, 3.0, 5.0, 7.0, 0.5])
    expected = [2 / (1 + math.exp(-1)), -3 / (1 + math.e), 0.0, 0.0, 100.0]
    assert ops.silu_mul(gate, up).tolist()[0] == pytest.approx(expected, rel=1e-6, abs=1e-30)


def test_silu_mul_smooth_quantize_smooths_the_product():
    gate, up = rows([50.0, 60.0, 0.0]), rows([2.0, 10.0, 9.0])
    q, scale = ops.silu_mul_smooth_quantize(gate, up, torch.tensor([1.27, 0.1, 1.0]))
    assert scale.item() == pytest.approx(1.0, rel=1e-6)
    assert q.tolist() == [[127, 60, 0]]


@pytest.mark.parametrize("k", [1, 3, 1024, 1025, 5000])
def test_w8a8_sums_are_exact_at_full_range(k):
    random = np.random.default_rng(k)
    q = random.choice([-127, 127, -126, 125], (3, k)).astype(np.int8)
    weight = random.choice([-127, 127, 126, -1], (5, k)).astype(np.int8)
    q[0], weight[0] = 127, 127
    y = ops.w8a8_linear(torch.from_numpy(q), torch.ones(3), torch.from_numpy(weight), torch.ones(5))
    exact = q.astype(np.int64) @ weight.astype(np.int64).T
    assert torch.equal(y, torch.from_numpy(exact).float())


def test_w8a16_sums_are_exact_where_int32_overflows():
    k = 4096
    q, weight = torch.full((1, k), 32767, dtype=torch.int16), torch.full((2, k), 127, dtype=torch.int8)
    weight[1, ::2] = -127
    y = ops.w8a16_linear(q, torch.ones(1), weight, torch.ones(2))
    assert 32767 * 127 * k > 2**31
    assert y.tolist() == [[float(np.float32(32767 * 127 * k)), 0.0]]


@pytest.mark.parametrize(("linear", "dtype"), [(ops.w8a8_linear, torch.int8), (ops.w8a16_linear, torch.int16)])
def test_linears_apply_row_scale_channel_scale_and_bias(linear, dtype):
    q = torch.tensor([[1, 2], [3, -4]], dtype=dtype)
    weight = torch.tensor([[5, 6], [-7, 8], [0, 1]], dtype=torch.int8)
    scale, weight_scale = torch.tensor([0.5, 2.0]), torch.tensor([1.0, 0.25, 4.0])
    y = linear(q, scale, weight, weight_scale, torch.tensor([1.0, -1.0, 0.5]).bfloat16())
    assert y.dtype == torch.float32
    assert y.tolist() == [[9.5, 0.125, 4.5], [-17.0, -27.5, -31.5]]
    assert linear(q, scale, weight, weight_scale).tolist() == [[8.5, 1.125, 4.0], [-18.0, -26.5, -32.0]]
