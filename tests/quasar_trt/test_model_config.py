"""A configuration that cannot be computed with does not come to be."""

from __future__ import annotations

import dataclasses

import pytest

from quasar_trt.errors import QuasarError
from quasar_trt.model_config import ModelConfig

CONFIG = ModelConfig("LlamaForCausalLM", 24, 40, 2, 4, 2, 8, 50, 64, 1e-5, 10000.0)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hidden_size", 0, ["at least 1"]),
        ("num_hidden_layers", -2, ["at least 1"]),
        ("vocab_size", 50.0, ["whole number"]),
        ("intermediate_size", True, ["whole number"]),
        ("num_key_value_heads", [2, 2], ["whole number"]),
        ("max_position_embeddings", 1, ["at least 2"]),
        ("head_size", 7, ["even"]),
        ("norm_epsilon", 0.0, ["above 0"]),
        ("norm_epsilon", float("nan"), ["finite"]),
        ("rotary_base", float("inf"), ["finite"]),
        ("rotary_base", 10**400, ["finite"]),
        ("rotary_base", "10000", ["finite"]),
        ("rotary_scaling", [], ["an object or null"]),
        ("qkv_bias", None, ["true or false"]),
        ("sliding_window", 0, ["at least 1"]),
        ("architecture", 3, ["a name"]),
    ],
)
def test_a_value_outside_its_range_is_named(field, value, words):
    with pytest.raises(QuasarError) as error:
        dataclasses.replace(CONFIG, **{field: value})
    for word in [f"{field} is {value!r}", *words]:
        assert word in str(error.value)


def test_heads_must_be_a_multiple_of_the_kv_heads():
    with pytest.raises(QuasarError, match="num_attention_heads 4 is not a multiple of num_key_value_heads 3"):
        dataclasses.replace(CONFIG, num_key_value_heads=3)


def test_whole_numbers_of_json_become_floats():
    config = dataclasses.replace(CONFIG, rotary_base=500000)
    assert isinstance(config.rotary_base, float)


def test_a_stored_config_comes_back():
    config = dataclasses.replace(CONFIG, rotary_scaling={"rope_type": "linear", "factor": 2.0}, dense_bias=True)
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_unknown_and_missing_keys_are_refused():
    with pytest.raises(QuasarError, match=r"model has qk_norm.*built by a newer version"):
        ModelConfig.from_dict(CONFIG.to_dict() | {"qk_norm": True})
    with pytest.raises(QuasarError, match="model lacks hidden_size, vocab_size"):
        ModelConfig.from_dict({k: v for k, v in CONFIG.to_dict().items() if k not in ("hidden_size", "vocab_size")})
    with pytest.raises(QuasarError, match=r"model is \[\]; it must be an object"):
        ModelConfig.from_dict([])
