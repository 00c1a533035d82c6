"""Smoothing: exact as arithmetic, harmless on dead channels, and worth its name on outliers."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import checkpoint_tensors, tiny_llama

from quasar_trt.builders.input_sizes import InputSizes
from quasar_trt.builders.quantize import quantize_rows
from quasar_trt.builders.smooth import count_extremes, fold, layer_groups, smoother
from quasar_trt.errors import QuasarError
from quasar_trt.plugins.reference import quantize_8, smooth_quantize, w8a8_linear


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dead_channels_and_unread_columns_are_left_alone(alpha):
    s = smoother(torch.tensor([0.0, 8.0, 3.0]), torch.tensor([1.0, 2.0, 0.0]), alpha)
    assert s[0] == 1.0 and s[2] == 1.0
    assert s[1] == pytest.approx(8.0**alpha / 2.0 ** (1 - alpha))
    assert torch.isfinite(s).all() and (s > 0).all()


def test_a_smoothed_product_is_unchanged():
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(32, 2, generator=generator), torch.randn(5, 2, generator=generator)
    x[:, 0] = 0
    s = smoother(torch.tensor([0.0, 8.0]), torch.tensor([1.0, 2.0]), 0.5)
    assert s.tolist() == [1.0, 2.0]
    assert relative_error((x / s) @ (weight * s).T, x @ weight.T) < 1e-6


def test_rounding_the_folded_norm_costs_nothing():
    generator = torch.Generator().manual_seed(2)
    norm = 1 + 0.3 * torch.randn(64, generator=generator)
    norm[3], norm[5] = 0.0, -0.7
    s = torch.rand(64, generator=generator) * 10 + 0.01
    stored, factor = fold(norm, s)
    assert stored.dtype == torch.bfloat16 and factor.dtype == torch.float32
    assert torch.allclose(stored.float() * factor, norm, rtol=1e-6, atol=0)
    assert stored[3] == 0 and factor[3] == s[3]
    assert torch.isfinite(factor).all() and (factor > 0).all()


def test_an_outlier_channel_loses_at_least_four_fifths_of_its_harm():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator)
    x[:, 7] *= 100
    weight = torch.randn(128, 256, generator=generator) * 0.05
    exact = x @ weight.T

    codes, scale = quantize_rows(weight)
    plain = relative_error(w8a8_linear(*quantize_8(x), codes, scale, None), exact)
    s = smoother(x.abs().amax(0), weight.abs().amax(0), 0.5)
    codes, scale = quantize_rows(weight * s)
    smooth = relative_error(w8a8_linear(*smooth_quantize(x, 1 / s), codes, scale, None), exact)
    assert plain == pytest.approx(0.036, abs=0.01)
    assert smooth == pytest.approx(0.005, abs=0.002)
    assert smooth * 4 < plain


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, [0.5, 4.0]), (1.0, [8.0, 3.0]), (0.5, [2.0, 12**0.5])])
def test_alpha_moves_the_difficulty(alpha, expected):
    s = smoother(torch.tensor([8.0, 3.0]), torch.tensor([2.0, 0.25]), alpha)
    assert s.tolist() == pytest.approx(expected)


def test_every_linear_is_in_one_group_and_readers_of_a_norm_are_together():
    config, _ = checkpoint_tensors(tiny_llama(0))
    groups = [(group.norm, group.linears) for group in layer_groups(config, 2)]
    p = "transformer.layers.2."
    assert groups == [
        (f"{p}input_layernorm", (f"{p}attention.qkv",)),
        (None, (f"{p}attention.dense",)),
        (f"{p}post_layernorm", (f"{p}mlp.fc", f"{p}mlp.gate")),
        (None, (f"{p}mlp.proj",)),
    ]


def test_zero_rows_and_clamped_channels_are_counted():
    weights = [torch.ones(5, 4), torch.ones(3, 4)]
    weights[0][[1, 3]] = 0
    weights[1][0, 2] = 0
    s = torch.tensor([1e-5, 1.0, 1e5, 2.0])
    assert count_extremes(weights, s) == {"zero_rows": 2, "clamped_channels": 2}
    assert smoother(torch.tensor([1e-30, 1e30]), torch.tensor([1.0, 1.0]), 1.0).tolist() == pytest.approx([1e-5, 1e5])


def test_dead_and_outlying_channels_are_counted():
    sizes = InputSizes()
    x = torch.ones(8, 16)
    x[:, [2, 5]], x[3, 7] = 0, -60
    sizes("a", x)
    sizes("b", torch.ones(2, 4))
    assert sizes.report() == {"dead_channels": 2, "outliers": {"a": 60.0}}


def test_an_outlier_among_dead_channels_has_a_finite_ratio():
    sizes = InputSizes()
    sizes("a", torch.tensor([[1e30, 0.0, 0.0]]))
    assert math.isfinite(sizes.report()["outliers"]["a"])


def test_an_input_that_is_not_finite_is_refused_by_name():
    with pytest.raises(QuasarError, match=r"input of layers\.3\.mlp\.proj"):
        InputSizes()("layers.3.mlp.proj", torch.tensor([[1.0, float("nan")], [1.0, 2.0]]))
