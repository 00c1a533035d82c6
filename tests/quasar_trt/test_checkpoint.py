"""The checkpoint inside an engine directory: opened whole, or refused in one line."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tiny import tiny_checkpoint, write_engine_dir

from quasar_trt.checkpoint import OWN_ARCHITECTURE, Checkpoint, checkpoint_config, checkpoint_spec
from quasar_trt.engines.cpu_layout import packed_spec
from quasar_trt.errors import QuasarError
from quasar_trt.plugins.packing import packed_shape
from quasar_trt.recipe import Recipe


@pytest.fixture
def directory(tmp_path):
    return write_engine_dir(tmp_path, *tiny_checkpoint(0)) / "checkpoint"


def test_config_and_recipe_come_back(directory):
    config, recipe, _ = tiny_checkpoint(0)
    checkpoint = Checkpoint.open(directory)
    assert (checkpoint.config, checkpoint.recipe) == (config, recipe)


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("model", [], ["model is []", "an object"]),
        ("model", None, ["model is None"]),
        ("model", {}, ["model lacks architecture"]),
        ("recipe", "int8", ["recipe is 'int8'"]),
        ("recipe", {"quantization": "int3"}, ["unknown quantization 'int3'"]),
        ("recipe", {"quantization": "none", "rotation": "hadamard"}, ["rotation", "newer version"]),
        ("model", {"architecture": "OtherForCausalLM"}, ["unknown architecture 'OtherForCausalLM'"]),
        ("model", {"head_size": 0}, ["head_size is 0"]),
    ],
)
def test_a_description_that_cannot_be_read_is_refused(directory, part, value, words):
    path = directory / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    whole = values["quasar"][part]
    values["quasar"][part] = whole | value if part == "model" and value else value
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(QuasarError) as error:
        Checkpoint.open(directory)
    assert "\n" not in str(error.value)
    for word in [str(path), *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("text", ["[]", "3", '{"quasar": []}', '{"quasar": null}', "{}", "{"])
def test_a_foreign_config_is_refused(directory, text):
    (directory / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(QuasarError, match="is not a checkpoint of this product"):
        Checkpoint.open(directory)


@pytest.mark.parametrize(
    ("changes", "recipe", "stock"),
    [
        ({}, Recipe(), True),
        ({"qkv_bias": True, "dense_bias": True}, Recipe("none"), True),
        ({"qkv_bias": True}, Recipe("none"), False),
        ({"dense_bias": True}, Recipe(), False),
        ({}, Recipe(quantize_lm_head=True), False),
        ({"rotary_scaling": {"rope_type": "yarn", "factor": 4.0}}, Recipe(), False),
        ({"architecture": "PanguEmbeddedForCausalLM", "qkv_bias": True, "dense_bias": True}, Recipe(), True),
        ({"architecture": "Qwen2ForCausalLM", "qkv_bias": True}, Recipe(), False),
        ({"architecture": "Qwen3ForCausalLM"}, Recipe("none"), False),
    ],
)
def test_what_stock_loaders_cannot_express_has_another_architecture(changes, recipe, stock):
    config = dataclasses.replace(tiny_checkpoint(0)[0], **changes)
    values = checkpoint_config(config, recipe)
    assert (values["architecture"] == "LlamaForCausalLM") == stock
    assert (values["architecture"] == OWN_ARCHITECTURE) != stock
    excluded = ["lm_head"] if recipe.quantized and not recipe.quantize_lm_head else None
    assert values["quantization"]["exclude_modules"] == excluded


@pytest.mark.parametrize("recipe", [Recipe(), Recipe("none")])
def test_norms_over_heads_are_declared_and_have_no_scale(recipe):
    llama = tiny_checkpoint(0)[0]
    qwen3 = dataclasses.replace(llama, architecture="Qwen3ForCausalLM")
    assert checkpoint_config(qwen3, recipe)["qk_layernorm"] and not checkpoint_config(llama, recipe)["qk_layernorm"]
    spec = checkpoint_spec(qwen3, recipe)
    added = spec.keys() - checkpoint_spec(llama, recipe).keys()
    assert added == {f"transformer.layers.{i}.attention.{x}_layernorm.weight" for i in range(3) for x in "qk"}
    assert {(spec[name].dtype, spec[name].shape) for name in added} == {("BF16", (16,))}


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"mlp_bias": True}])
def test_the_packed_file_has_the_linears_of_the_checkpoint(changes):
    config = dataclasses.replace(tiny_checkpoint(0)[0], **changes)
    spec, packed = checkpoint_spec(config, Recipe()), packed_spec(config, Recipe())
    prefix = "transformer.layers.1."
    for name in ("attention.qkv", "attention.dense", "mlp.proj"):
        assert packed[f"{prefix}{name}.weight"].shape == packed_shape(*spec[f"{prefix}{name}.weight"].shape, True)
        for part, theirs in (("bias", "bias"), ("inverse_smoother", "smoother")):
            assert (f"{prefix}{name}.{part}" in packed) == (f"{prefix}{name}.{theirs}" in spec)
    assert packed[f"{prefix}mlp.fc_gate.weight"].shape == packed_shape(
        2 * config.intermediate_size, config.hidden_size, True
    )
    assert (f"{prefix}mlp.fc_gate.bias" in packed) == bool(changes.get("mlp_bias"))
