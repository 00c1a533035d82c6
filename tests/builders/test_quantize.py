from __future__ import annotations

import torch

from quasar_trt.builders.quantize import quantize_rows


def test_codes_round_half_to_even_and_never_reach_minus_128():
    weight = torch.tensor([[-1.0, 0.999, 0.0, 0.5], [-3.0, -3.0, -1.5, -0.1], [0.0, 0.0, 0.0, 0.0]])
    codes, scale = quantize_rows(weight)
    assert codes.dtype == torch.int8
    assert codes.tolist() == [[-127, 127, 0, 64], [-127, -127, -64, -4], [0, 0, 0, 0]]  # 63.5 -> 64
    assert torch.equal(scale, torch.tensor([[1 / 127, 3 / 127, 1.0]]))


def test_a_row_too_small_for_a_scale_counts_as_zero():
    codes, scale = quantize_rows(torch.tensor([[1e-42, -1e-42]]))
    assert codes.tolist() == [[0, 0]] and scale.item() == 1.0


def test_the_error_is_at_most_half_a_step_of_each_row():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 16)[:, None]
    codes, scale = quantize_rows(weight)
    assert ((codes * scale.T - weight).abs() <= scale.T * 0.50001).all()
