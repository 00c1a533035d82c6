"""A recipe holds what acts, and comes back from its stored form."""

from __future__ import annotations

import pytest

from quasar_trt.errors import QuasarError
from quasar_trt.recipe import Recipe

RECIPES = [
    Recipe(),
    Recipe(smoothquant=0.7, lm_head="int8"),
    Recipe(smoothquant=0, lm_head="rescored"),
    Recipe(smoothquant=0.5, rotate=True, rounding="gptq"),
    Recipe(rotate=False, rounding="nearest", activations=16, exclude=["*.mlp.proj", "transformer.layers.0.*"]),
    Recipe(static_activations=True, weight_only=["transformer.layers.0.mlp.proj"]),
    Recipe("none"),
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_stored_recipe_comes_back(recipe):
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_smoothing_is_searched_unless_said_otherwise_and_absent_without_quantization():
    assert Recipe().smoothquant is None
    assert Recipe().to_dict()["smoothquant"] is None
    assert Recipe("none").smoothquant is None
    assert Recipe("none").to_dict()["smoothquant"] is None


@pytest.mark.parametrize(
    ("recipe", "rotate", "rounding", "activations", "lm_head"),
    [
        (Recipe(), True, "gptq", 8, "rescored"),
        (Recipe(smoothquant=0.5), False, "nearest", 8, "rescored"),
        (Recipe(rotate=False, activations=16, lm_head="int8"), False, "nearest", 16, "int8"),
        (Recipe("none"), None, None, None, None),
    ],
)
def test_what_a_recipe_leaves_open_follows_from_how_it_smooths(recipe, rotate, rounding, activations, lm_head):
    assert (recipe.rotate, recipe.rounding, recipe.activations) == (rotate, rounding, activations)
    assert recipe.lm_head == lm_head


def test_what_is_stored_spells_out_the_bits():
    stored = Recipe(activations=16, lm_head="int8").to_dict()
    assert (stored["weight_bits"], stored["activation_bits"], stored["lm_head"]) == (8, 16, "int8")
    assert stored["activation_granularity"] == "per_token"
    assert Recipe(static_activations=True).to_dict()["activation_granularity"] == "per_tensor"
    stored = Recipe("none").to_dict()
    assert (stored["weight_bits"], stored["activation_bits"], stored["lm_head"]) == (16, None, None)


def test_a_linear_is_quantized_unless_a_pattern_matches_its_whole_name():
    recipe = Recipe(exclude=("*.mlp.proj", "transformer.layers.1.*"))
    names = [f"transformer.layers.{i}.{name}" for i in (0, 1, 11) for name in ("attention.qkv", "mlp.proj")]
    assert [recipe.quantizes(name) for name in names] == [True, False, False, False, True, False]
    assert not any(Recipe("none").quantizes(name) for name in names)


def test_a_static_recipe_says_which_linears_read_what():
    recipe = Recipe(static_activations=True, weight_only=("a.mlp.proj",), exclude=("b.*",))
    names = ["a.mlp.fc", "a.mlp.proj", "b.mlp.fc"]
    assert [recipe.is_static(name) for name in names] == [True, False, False]
    assert [recipe.activation_bits(name) for name in names[:2]] == [8, 16]
    assert not Recipe().is_static("a.mlp.fc")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization": "none", "smoothquant": 0.5}, ["smoothquant has no use with quantization 'none'", "'int8'"]),
        ({"quantization": "none", "lm_head": "int8"}, ["lm_head has no use with quantization 'none'"]),
        ({"quantization": "int4"}, ["unknown quantization 'int4'", "int8, none"]),
        ({"quantization": 8}, ["unknown quantization '8'"]),
        ({"smoothquant": 1.5}, ["smoothquant is 1.5", "0 to 1"]),
        ({"smoothquant": float("nan")}, ["smoothquant is nan"]),
        ({"smoothquant": -0.1}, ["smoothquant is -0.1"]),
        ({"smoothquant": "high"}, ["smoothquant is high"]),
        ({"lm_head": "int4"}, ["unknown lm_head 'int4'", "bf16, int8, rescored"]),
        ({"rotate": "yes"}, ["rotate is 'yes'", "true, false"]),
        ({"rounding": "up"}, ["unknown rounding 'up'", "gptq, nearest"]),
        ({"activations": 12}, ["activations is 12", "8, 16"]),
        ({"exclude": "*.mlp.proj"}, ["exclude is '*.mlp.proj'", "a list"]),
        ({"exclude": [""]}, ["exclude is ['']"]),
        ({"quantization": "none", "rotate": True}, ["rotate has no use with quantization 'none'"]),
        ({"quantization": "none", "rounding": "gptq"}, ["rounding has no use"]),
        ({"quantization": "none", "activations": 16}, ["activations has no use"]),
        ({"quantization": "none", "exclude": ["*"]}, ["exclude has no use"]),
        ({"quantization": "none", "static_activations": True}, ["static_activations has no use"]),
        ({"static_activations": True, "activations": 16}, ["activations is 16", "static ones have 8 bits"]),
        ({"static_activations": 1}, ["static_activations is 1", "true, false"]),
        ({"weight_only": ["a"]}, ["weight_only has no use without static_activations"]),
        ({"weight_only": "a", "static_activations": True}, ["weight_only is 'a'", "a list"]),
        ({"smoothqant": 0.5}, ["unknown recipe option 'smoothqant'", "did you mean 'smoothquant'"]),
    ],
)
def test_options_that_cannot_act_are_refused(options, words):
    with pytest.raises(QuasarError) as error:
        Recipe(**options)
    for word in words:
        assert word in str(error.value)


def test_a_recipe_of_a_newer_version_is_refused():
    with pytest.raises(QuasarError, match=r"recipe has group_size.*built by a newer version"):
        Recipe.from_dict(Recipe().to_dict() | {"group_size": 128})
