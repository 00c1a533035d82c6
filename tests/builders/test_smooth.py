"""Smoothing: exact as arithmetic, harmless on dead channels, and worth its name on outliers."""

from __future__ import annotations

import pytest
import torch
from tiny import checkpoint_tensors, random_ids, tiny_llama

from quasar_trt.builders.calibrate import ChannelMaxima
from quasar_trt.builders.quantize import quantize_rows
from quasar_trt.builders.smooth import count_extremes, fold, layer_groups, smoother, textbook_smoothers
from quasar_trt.builders.write_checkpoint import smoothed_layer
from quasar_trt.engines.reference import ReferenceModel
from quasar_trt.plugins.reference import quantize_8, smooth_quantize, w8a8_linear
from quasar_trt.recipe import Recipe


def textbook_layer(config, tensors, observer: ChannelMaxima, alpha: float = 0.5) -> dict[str, torch.Tensor]:
    return smoothed_layer(config, tensors, textbook_smoothers(config, alpha, tensors, observer.maxima), 0)


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

    observer = ChannelMaxima()
    observer("layer", x)
    assert observer.report()["outliers"]["layer"] > 50


def test_a_smoothed_layer_computes_what_the_source_layer_does():
    """Checked without rounding: the codes are undone, so that only smoothing and folding remain."""
    config, tensors = checkpoint_tensors(tiny_llama(5, num_hidden_layers=1))
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    prefix = "transformer.layers.0."
    tensors[f"{prefix}input_layernorm.weight"][4] = 0  # a dead channel of q, k and v
    observer = ChannelMaxima()
    model = ReferenceModel(config, Recipe("none"), tensors, observe=observer)
    model(random_ids(config, 48))
    assert observer.rows == 48
    assert observer.report()["dead_channels"] == 1

    layer = textbook_layer(config, tensors, observer)
    assert all(torch.isfinite(tensor.float()).all() for tensor in layer.values())
    assert torch.equal(layer[f"{prefix}input_layernorm.scale_to_int"], torch.ones(1))
    undone = dict(tensors)
    for norm in ("input_layernorm", "post_layernorm"):
        undone[f"{prefix}{norm}.weight"] = layer[f"{prefix}{norm}.weight"].float()
    for name in ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj"):
        weight = layer[f"{prefix}{name}.weight"].float() * layer[f"{prefix}{name}.per_channel_scale"].T
        smoothing = layer.get(f"{prefix}{name}.smoother")
        undone[f"{prefix}{name}.weight"] = weight if smoothing is None else weight / smoothing
    ids = random_ids(config, 20, seed=9)
    assert relative_error(ReferenceModel(config, Recipe("none"), undone)(ids), model(ids)) < 0.03


def test_a_bf16_source_gives_the_layer_of_its_float32_copy():
    config, tensors = checkpoint_tensors(tiny_llama(6, num_hidden_layers=1))
    widened = {name: tensor.float() for name, tensor in tensors.items()}
    observer = ChannelMaxima()
    ReferenceModel(config, Recipe("none"), tensors, observe=observer)(random_ids(config, 32))
    expected = textbook_layer(config, widened, observer)
    found = textbook_layer(config, tensors, observer)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("overrides", [{}, {"attention_bias": True, "mlp_bias": True}])
def test_linears_behind_one_norm_share_its_smoother(overrides):
    config, tensors = checkpoint_tensors(tiny_llama(6, num_hidden_layers=1, **overrides))
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    observer = ChannelMaxima()
    ReferenceModel(config, Recipe("none"), tensors, observe=observer)(random_ids(config, 32))
    prefix = "transformer.layers.0."
    layer = textbook_layer(config, tensors, observer, 0.6)
    weights = [tensors[f"{prefix}mlp.{name}.weight"].abs().amax(0) for name in ("fc", "gate")]
    expected = observer.maxima[f"{prefix}mlp.fc"] ** 0.6 / torch.maximum(*weights) ** 0.4
    folded = (tensors[f"{prefix}post_layernorm.weight"] / expected).bfloat16()
    assert torch.equal(layer[f"{prefix}post_layernorm.weight"], folded)
    factor = tensors[f"{prefix}post_layernorm.weight"] / folded.float()
    for name in ("fc", "gate"):
        codes, scale = quantize_rows(tensors[f"{prefix}mlp.{name}.weight"] * factor)
        assert torch.equal(layer[f"{prefix}mlp.{name}.weight"], codes)
        assert torch.equal(layer[f"{prefix}mlp.{name}.per_channel_scale"], scale)
    assert (f"{prefix}mlp.fc.bias" in layer) == bool(overrides)


def test_alpha_acts():
    config, tensors = checkpoint_tensors(tiny_llama(7, num_hidden_layers=1))
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    observer = ChannelMaxima()
    ReferenceModel(config, Recipe("none"), tensors, observe=observer)(random_ids(config, 32))
    name = "transformer.layers.0.mlp.proj"
    layer = textbook_layer(config, tensors, observer, 1.0)
    assert torch.equal(layer[f"{name}.smoother"][0], observer.maxima[name])
    layer = textbook_layer(config, tensors, observer, 0.0)
    assert torch.allclose(layer[f"{name}.smoother"][0], 1 / tensors[f"{name}.weight"].abs().amax(0))


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
    config, tensors = checkpoint_tensors(tiny_llama(8))
    tensors["transformer.layers.1.mlp.fc.weight"][[2, 7]] = 0
    smoothers = {"a": torch.tensor([1e-5, 1.0, 1e5]), "b": torch.tensor([2.0, 1e5])}
    assert count_extremes(config, tensors, smoothers) == {"zero_rows": 2, "clamped_channels": 3}
