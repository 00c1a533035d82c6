"""The checkpoint inside an engine directory: opened whole, or refused in one line."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tiny import tiny_checkpoint, write_engine_dir

from quasar_trt.architectures import hadamard_blocks
from quasar_trt.checkpoint import OWN_ARCHITECTURE, Checkpoint, checkpoint_config, checkpoint_spec, stock_obstacles
from quasar_trt.engines.cpu_layout import packed_spec
from quasar_trt.errors import QuasarError
from quasar_trt.plugins.packing import packed_shape
from quasar_trt.recipe import Recipe
from quasar_trt.tensorfile import TensorSpec

PLAIN = Recipe(rotate=False)  # what stock modules run


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


LLAMA, OURS = "LlamaForCausalLM", OWN_ARCHITECTURE


@pytest.mark.parametrize(
    ("changes", "recipe", "name"),
    [
        ({}, PLAIN, LLAMA),
        ({}, Recipe(rotate=True), OURS),
        ({}, Recipe(rotate=False, activations=16), OURS),
        ({"qkv_bias": True, "dense_bias": True}, Recipe("none"), LLAMA),
        ({"qkv_bias": True}, Recipe("none"), OURS),
        ({"dense_bias": True}, PLAIN, OURS),
        ({}, Recipe(rotate=False, static_activations=True), OURS),
        ({}, Recipe(rotate=False, lm_head="int8"), OURS),
        ({}, Recipe(rotate=False, lm_head="rescored"), LLAMA),  # whose checkpoint has the BF16 head
        ({"rotary_scaling": {"rope_type": "yarn", "factor": 4.0}}, PLAIN, OURS),
        ({"head_size": 16}, PLAIN, OURS),  # 96 rows of q, where SmoothQuant modules take hidden_size, 48, for granted
        ({"head_size": 16}, Recipe("none"), LLAMA),
        ({"architecture": "MistralForCausalLM"}, PLAIN, "MistralForCausalLM"),
        ({"architecture": "PanguEmbeddedForCausalLM", "qkv_bias": True, "dense_bias": True}, PLAIN, LLAMA),
        ({"architecture": "Qwen2ForCausalLM", "qkv_bias": True}, PLAIN, "Qwen2ForCausalLM"),
        ({"architecture": "Qwen3ForCausalLM"}, PLAIN, OURS),
        ({"architecture": "Qwen3ForCausalLM"}, Recipe("none"), OURS),
    ],
)
def test_what_stock_loaders_cannot_express_has_another_architecture(changes, recipe, name):
    config = dataclasses.replace(tiny_checkpoint(0, head_dim=8)[0], **changes)
    values = checkpoint_config(config, recipe)
    assert values["architecture"] == name
    scales = "PER_TENSOR" if recipe.static_activations else "PER_TOKEN"
    algorithm = f"W8A8_SQ_PER_CHANNEL_{scales}_PLUGIN" if recipe.quantized else None
    assert values["quantization"]["quant_algo"] == algorithm
    assert (stock_obstacles(config, recipe) == []) == (name != OURS)
    assert values.get("qwen_type") == ("qwen2" if name == "Qwen2ForCausalLM" else None)
    head = [] if recipe.lm_head == "int8" else ["lm_head"]
    assert values["quantization"]["exclude_modules"] == (head if recipe.quantized else None)


@pytest.mark.parametrize("recipe", [Recipe(), Recipe("none")])
def test_norms_over_heads_are_declared_and_have_no_scale(recipe):
    llama = tiny_checkpoint(0)[0]
    qwen3 = dataclasses.replace(llama, architecture="Qwen3ForCausalLM")
    assert checkpoint_config(qwen3, recipe)["qk_layernorm"] and not checkpoint_config(llama, recipe)["qk_layernorm"]
    spec = checkpoint_spec(qwen3, recipe)
    added = spec.keys() - checkpoint_spec(llama, recipe).keys()
    assert added == {f"transformer.layers.{i}.attention.{x}_layernorm.weight" for i in range(3) for x in "qk"}
    assert {(spec[name].dtype, spec[name].shape) for name in added} == {("BF16", (16,))}


def test_static_linears_have_a_scale_of_their_input():
    recipe = Recipe(
        static_activations=True, exclude=("*.1.attention.dense",), weight_only=("transformer.layers.0.mlp.proj",)
    )
    config = tiny_checkpoint(0)[0]
    spec = checkpoint_spec(config, recipe)
    added = spec.keys() - checkpoint_spec(config, Recipe(exclude=recipe.exclude)).keys()
    assert len(added) == 3 * 5 - 1 and {spec[name].shape for name in added} == {(1,)}
    assert "transformer.layers.0.mlp.proj.act_scale" in added  # measured, and not used


def test_excluded_linears_stay_in_bf16_and_are_named():
    recipe = Recipe(rotate=False, exclude=("*.1.attention.dense", "*.2.mlp.fc", "*.2.mlp.gate"))
    config = tiny_checkpoint(0)[0]
    names = [f"transformer.layers.{name}" for name in ("1.attention.dense", "2.mlp.fc", "2.mlp.gate")]
    values = checkpoint_config(config, recipe)
    assert values["architecture"] == OWN_ARCHITECTURE
    assert values["quantization"]["exclude_modules"] == [*names, "lm_head"]
    spec, whole = checkpoint_spec(config, recipe), checkpoint_spec(config, PLAIN)
    changed = {name for name in spec if spec[name] != whole[name]}
    assert changed == {f"{name}.weight" for name in names} and {spec[name].dtype for name in changed} == {"BF16"}
    gone = {f"{name}.per_channel_scale" for name in names} | {"transformer.layers.2.post_layernorm.scale_to_int"}
    assert whole.keys() - spec.keys() == gone | {"transformer.layers.1.attention.dense.smoother"}


@pytest.mark.parametrize(
    ("exclude", "words"),
    [
        (
            ["*.mlp.proj", "*.o_proj"],
            ["'*.o_proj' matches no linear", "transformer.layers.0.attention.qkv to transformer.layers.2.mlp.proj"],
        ),
        (["lm_head"], ["'lm_head' matches no linear", "the head follows lm_head"]),
        (["*.1.mlp.fc"], ["transformer.layers.1.mlp.fc and transformer.layers.1.mlp.gate", "both or neither"]),
        (["*.gate"], ["transformer.layers.0.mlp.fc and transformer.layers.0.mlp.gate"]),
    ],
)
def test_exclusions_that_cannot_act_are_refused(exclude, words):
    for spec in (checkpoint_spec, packed_spec):
        with pytest.raises(QuasarError) as error:
            spec(tiny_checkpoint(0)[0], Recipe(exclude=exclude))
        for word in words:
            assert word in str(error.value)


@pytest.mark.parametrize(
    ("weight_only", "words"),
    [
        (
            ("transformer.layers.3.mlp.proj",),
            "weight_only 'transformer.layers.3.mlp.proj' is no linear; allowed: names from ",
        ),
        (
            ("transformer.layers.1.mlp.gate",),
            "weight_only has one of transformer.layers.1.mlp.fc and transformer.layers.1.mlp",
        ),
    ],
)
def test_weight_only_linears_that_cannot_be_are_refused(weight_only, words):
    with pytest.raises(QuasarError, match=words):
        checkpoint_spec(tiny_checkpoint(0)[0], Recipe(static_activations=True, weight_only=weight_only))


def test_a_checkpoint_of_other_hadamard_blocks_is_refused(tmp_path):
    directory = write_engine_dir(tmp_path, *tiny_checkpoint(0, Recipe())) / "checkpoint"
    path = directory / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    assert values["quasar"]["hadamard_blocks"] == {"attention.dense": 16, "mlp.proj": 16}
    values["quasar"]["hadamard_blocks"]["mlp.proj"] = 8
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(QuasarError, match=r"hadamard_blocks .*'mlp.proj': 8.* this version computes .*'mlp.proj': 16"):
        Checkpoint.open(directory)


@pytest.mark.parametrize(
    ("recipe", "sizes", "blocks"),
    [
        (Recipe(), {}, {"attention.dense": 16, "mlp.proj": 16}),
        (Recipe(), {"head_size": 128, "intermediate_size": 12288}, {"attention.dense": 128, "mlp.proj": 512}),
        (Recipe(), {"head_size": 20, "intermediate_size": 99}, {"attention.dense": 4}),
        (Recipe(activations=16), {"intermediate_size": 1000}, {"attention.dense": 16, "mlp.proj": 8}),
        (PLAIN, {}, {}),
        (Recipe("none"), {}, {}),
    ],
)
def test_hadamard_blocks_are_powers_of_two_that_divide_a_head_and_the_mlp(recipe, sizes, blocks):
    assert hadamard_blocks(dataclasses.replace(tiny_checkpoint(0)[0], **sizes), recipe) == blocks


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"mlp_bias": True}])
@pytest.mark.parametrize("exclude", [(), ("*.1.mlp.[fg]*", "*.1.attention.dense")])
def test_the_packed_file_has_the_linears_of_the_checkpoint(changes, exclude):
    config, recipe = dataclasses.replace(tiny_checkpoint(0)[0], **changes), Recipe(exclude=exclude)
    spec, packed = checkpoint_spec(config, recipe), packed_spec(config, recipe)
    prefix = "transformer.layers.1."
    for name in ("attention.qkv", "attention.dense", "mlp.proj"):
        weight, quantized = spec[f"{prefix}{name}.weight"], recipe.quantizes(prefix + name)
        assert packed[f"{prefix}{name}.weight"] == TensorSpec(weight.dtype, packed_shape(*weight.shape, quantized))
        for part, theirs in (("bias", "bias"), ("inverse_smoother", "smoother"), ("scale", "per_channel_scale")):
            assert (f"{prefix}{name}.{part}" in packed) == (f"{prefix}{name}.{theirs}" in spec)
    shape = packed_shape(2 * config.intermediate_size, config.hidden_size, not exclude)
    assert packed[f"{prefix}mlp.fc_gate.weight"] == TensorSpec(spec[f"{prefix}mlp.fc.weight"].dtype, shape)
    assert (f"{prefix}mlp.fc_gate.scale" in packed) == (not exclude)
    assert (f"{prefix}mlp.fc_gate.bias" in packed) == bool(changes.get("mlp_bias"))
