"""Scales that calibration fixes: what they are, what they cost, and which linears go without."""

from __future__ import annotations

import pytest
import torch
from tiny import checkpoint_tensors, random_ids, tiny_llama

from quasar_trt.architectures import hadamard_blocks
from quasar_trt.builders import layer_quantizer
from quasar_trt.builders.layer_quantizer import LayerQuantizer
from quasar_trt.builders.search import Trial
from quasar_trt.builders.static_scale import static_scale
from quasar_trt.checkpoint import below_layer, checkpoint_spec
from quasar_trt.engines.reference import ReferenceModel
from quasar_trt.plugins import reference as ops
from quasar_trt.recipe import Recipe
from quasar_trt.tensorfile import to_numpy

STATIC = Recipe(static_activations=True, lm_head="bf16")


def test_the_largest_value_of_all_rows_has_the_largest_code():
    y = torch.tensor([[0.5, -2.54], [1.0, 0.25]])
    scale = static_scale(y)
    assert scale.shape == (1,) and scale.item() == pytest.approx(0.02)
    q, scales = ops.quantize_static(y, scale)
    assert q.tolist() == [[25, -127], [50, 12]]  # 12.5 goes to the even code
    assert scales.tolist() == [scale.item()] * 2
    assert static_scale(torch.zeros(2, 2)).item() == 1


def test_what_calibration_did_not_reach_is_clipped():
    q, _ = ops.quantize_static(torch.tensor([[300.0, -300.0, 1.0]]), torch.tensor([1.0]))
    assert q.tolist() == [[127, -128, 1]]


@pytest.mark.parametrize("block", [0, 16])
def test_the_static_error_is_the_mean_of_the_rows(block):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(40, 32, generator=generator), torch.randn(24, 32, generator=generator)
    x[3] *= 50  # a row that all others are small beside
    x[5] = 0
    s = 1 + torch.rand(32, generator=generator)
    y = ops.smooth(x, 1 / s, block)
    scale = static_scale(y)
    q, scales = ops.quantize_static(y, scale)
    lost = q * scales[:, None] - y
    error = lost @ (ops.hadamard(weight * s, block) if block else weight * s).T
    output = x @ weight.T
    errors = [float(a.norm() / b.norm()) if b.norm() else 0.0 for a, b in zip(error, output, strict=True)]
    trial = Trial(x, weight, block)
    assert trial.static_error(s, scale) == pytest.approx(sum(errors) / 40, rel=2e-3)
    assert errors[3] < 0.02 and trial.static_error(s, scale) > 0.1  # which the Frobenius norm would hide


def quantized(recipe: Recipe):
    """(config, tensors of the checkpoint, the quantizer) of a tiny model."""
    config, tensors = checkpoint_tensors(tiny_llama(7))
    texts = [random_ids(config, 200, seed=seed) for seed in (1, 2)]
    quantizer = LayerQuantizer(config, recipe, tensors["transformer.vocab_embedding.weight"], texts)
    found = dict(tensors)
    for i in range(config.num_hidden_layers):
        prefix = f"transformer.layers.{i}."
        found |= quantizer(i, {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)})
    return config, {name: found[name] for name in checkpoint_spec(config, recipe)}, quantizer, texts


@pytest.mark.parametrize("smoothquant", [None, 0.5])
def test_scales_are_those_of_the_inputs_that_the_engine_will_have(smoothquant):
    recipe = Recipe(static_activations=True, smoothquant=smoothquant, lm_head="bf16")
    config, tensors, quantizer, texts = quantized(recipe)
    inputs: dict[str, torch.Tensor] = {}
    model = ReferenceModel(config, quantizer.recipe, tensors, observe=inputs.__setitem__)
    model.hidden_states([(ids, model.new_cache()) for ids in texts])
    blocks = hadamard_blocks(config, recipe)
    for name, x in inputs.items():
        inverse = 1 / tensors.get(f"{name}.smoother", torch.ones(1))
        y = ops.smooth(x, inverse, blocks.get(below_layer(name), 0))
        assert tensors[f"{name}.act_scale"].item() == pytest.approx(
            float(y.abs().max() / 127), rel=0.02
        )  # ties may flip


def test_groups_beyond_the_bound_stay_weight_only_and_lose_less(monkeypatch):
    everywhere = quantized(STATIC)[2]
    errors = {name: choice.static_error for name, choice in everywhere.choices.items()}
    bound = sorted(errors.values())[len(errors) // 2]
    monkeypatch.setattr(layer_quantizer, "LARGEST_STATIC_ERROR", bound)
    config, tensors, quantizer, _ = quantized(STATIC)
    reported = {name: choice.report()["static_error"] for name, choice in quantizer.choices.items()}
    chosen = {name for name, error in reported.items() if error > bound}
    assert 0 < len(chosen) < len(reported)
    assert {name for name in quantizer.recipe.weight_only if name in reported} == chosen
    gates = {name.replace("mlp.fc", "mlp.gate") for name in chosen if name.endswith("mlp.fc")}
    assert set(quantizer.recipe.weight_only) == chosen | gates  # which share the input, and so the choice
    monkeypatch.setattr(layer_quantizer, "LARGEST_STATIC_ERROR", 0.0)
    _, weight_only, none_static, _ = quantized(STATIC)
    monkeypatch.setattr(layer_quantizer, "LARGEST_STATIC_ERROR", 1.0)
    _, all_static, static, _ = quantized(STATIC)
    assert static.recipe.weight_only == () and len(none_static.recipe.weight_only) == 5 * config.num_hidden_layers

    ids = random_ids(config, 60, seed=9)
    p = ReferenceModel(*(config, Recipe("none"), checkpoint_tensors(tiny_llama(7))[1]))(ids).double().log_softmax(-1)
    lost = []
    for recipe, stored in ((none_static.recipe, weight_only), (quantizer.recipe, tensors), (static.recipe, all_static)):
        q = ReferenceModel(config, recipe, stored)(ids).double().log_softmax(-1)
        lost.append(float((p.exp() * (p - q)).sum(-1).mean()))
    assert lost[0] < lost[1] < lost[2] < 0.02


def test_a_recipe_per_token_has_no_static_errors():
    _, tensors, quantizer, _ = quantized(Recipe(lm_head="bf16"))
    assert not any(name.endswith("act_scale") for name in tensors)
    assert all("static_error" not in choice.report() for choice in quantizer.choices.values())


def test_rounding_is_fitted_to_the_codes_of_the_fixed_scale():
    static, per_token = (quantized(recipe)[1] for recipe in (STATIC, Recipe(lm_head="bf16")))
    name = "transformer.layers.0.attention.qkv"  # whose input both have alike
    assert (to_numpy(static[f"{name}.per_channel_scale"]) == to_numpy(per_token[f"{name}.per_channel_scale"])).all()
    assert (static[f"{name}.weight"] != per_token[f"{name}.weight"]).any()
