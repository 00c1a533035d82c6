"""What a config.json means, and what of it is refused."""

from __future__ import annotations

import pytest
from tiny import LLAMA3

from quasar_trt.builders.hf_config import model_config as parse
from quasar_trt.errors import QuasarError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["FalconForCausalLM"]}, ["unknown architecture", "FalconForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": None}, ["names no architecture", "LlamaForCausalLM"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config (gptq)"]),
        ({"num_local_experts": 4}, ["LlamaForCausalLM", "num_local_experts = 4"]),
        ({"sliding_window": "x"}, ["sliding_window is 'x'"]),
        ({"architectures": ["MixtralForCausalLM"]}, ["MixtralForCausalLM", "mixtures of experts"]),
        ({"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 60}, ["Qwen2MoeForCausalLM with num_experts = 60"]),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, ["Qwen3MoeForCausalLM", "mixtures of experts"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'", "silu"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, ["hidden_size 24", "num_attention_heads 5"]),
        ({"head_dim": 7}, ["head_size is 7", "even"]),
        ({"head_dim": 0}, ["head_dim is 0", "at least 1"]),
        ({"hidden_size": "big"}, ["hidden_size is 'big'"]),
        ({"intermediate_size": 0}, ["intermediate_size is 0"]),
        ({"max_position_embeddings": 1}, ["max_position_embeddings is 1", "at least 2"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps is None"]),
        ({"rms_norm_eps": "x"}, ["rms_norm_eps is 'x'", "above 0"]),
        ({"attention_bias": "yes"}, ["qkv_bias is 'yes'"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures is 'LlamaForCausalLM'", "list"]),
        ({"architectures": [["x"]]}, ["unknown architecture"]),
        ({"quantization_config": "gptq"}, ["quantization_config (gptq)"]),
        ({"quantization_config": ["x"]}, ["quantization_config"]),
        ({"layer_types": 3}, ["layer_types has 3", "full_attention"]),
        ({"layer_types": ["full_attention", "linear_attention"]}, ["['linear_attention']"]),
        ({"rope_scaling": {"rope_type": 3}}, ["unknown rope type '3'"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["'factor'", "linear", "is 0", "above 0"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, ["'factor'", "is inf"]),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, ["'low_freq_factor'", "4.0", "below 'high_freq_factor'"]),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": None}}, ["'original_max_position_embeddings'"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, ["unknown rope type 'longrope'"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["one object", "all layers"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -1.0}}, ["'factor' of rope type 'yarn' is -1.0"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": "x"}}, ["'attention_factor'"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": 1}}, ["'truncate'", "true or false"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["'factor'"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
        ({"rope_theta": "x"}, ["rope_theta is 'x'"]),
        ({"rope_theta": float("nan")}, ["rope_theta is nan"]),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(changes, words):
    with pytest.raises(QuasarError) as error:
        parse(CONFIG | changes, "here/config.json")
    for word in ["here/config.json", *words]:
        assert word in str(error.value)


def test_a_config_without_sizes_lists_them_all():
    with pytest.raises(QuasarError, match="lacks hidden_size, vocab_size"):
        parse({key: value for key, value in CONFIG.items() if key not in ("hidden_size", "vocab_size")}, "c")


@pytest.mark.parametrize(
    ("changes", "base", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10000.0, {"type": "linear", "factor": 2.0}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, 7e4, None),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 7e4}},
            7e4,
            {"rope_type": "linear", "factor": 4.0},
        ),
    ],
)
def test_rope_under_both_spellings(changes, base, scaling):
    config = parse(CONFIG | changes, "c")
    assert (config.rotary_base, config.rotary_scaling) == (base, scaling)


def test_llama3_rope_parses():
    assert parse(CONFIG | {"rope_scaling": LLAMA3}, "c").rotary_scaling == LLAMA3


def test_explicit_head_dim_and_unused_window_are_accepted():
    config = parse(CONFIG | {"head_dim": 8, "sliding_window": 4096, "use_sliding_window": False}, "c")
    assert (config.head_size, config.attention_size, config.qkv_size) == (8, 32, 64)


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("MistralForCausalLM", {}, {"sliding_window": 4096, "max_position_embeddings": 131072}),
        ("MistralForCausalLM", {"attention_bias": True, "sliding_window": None}, {"qkv_bias": False}),
        ("Qwen2ForCausalLM", {}, {"qkv_bias": True, "dense_bias": False, "mlp_bias": False, "norm_epsilon": 1e-6}),
        ("Qwen3ForCausalLM", {}, {"head_size": 128, "qkv_bias": False, "max_position_embeddings": 32768}),
        ("Qwen3ForCausalLM", {"attention_bias": True}, {"qkv_bias": True, "dense_bias": True}),
        (
            "PanguEmbeddedForCausalLM",
            {},
            {"qkv_bias": True, "dense_bias": True, "mlp_bias": False, "norm_epsilon": 1e-5, "rotary_base": 16e6},
        ),
        ("PanguEmbeddedForCausalLM", {"bias": False, "mlp_bias": True}, {"qkv_bias": False, "mlp_bias": False}),
    ],
)
def test_what_a_config_leaves_out_means_what_its_family_means(architecture, changes, expected):
    config = parse(CONFIG | {"architectures": [architecture]} | changes, "c")
    assert {key: getattr(config, key) for key in expected} == expected


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 64, "sliding_window": 16}


@pytest.mark.parametrize(
    ("values", "window"),
    [
        ({"sliding_window": 16, "max_position_embeddings": 64}, 16),
        ({"sliding_window": 64, "max_position_embeddings": 64}, None),  # sees everything
        ({"sliding_window": None, "max_position_embeddings": 64}, None),
        (QWEN2, None),  # off unless switched on
        (QWEN2 | {"use_sliding_window": True}, None),  # from layer 28 on, and there are 2
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 1}, 16),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, 16),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["full_attention"] * 2}, None),
    ],
)
def test_a_window_counts_where_a_layer_uses_it(values, window):
    assert parse(CONFIG | values, "c").sliding_window == window


def test_an_original_maximum_beside_the_rope_parameters_counts():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = parse(CONFIG | {"rope_scaling": yarn, "original_max_position_embeddings": 32}, "c")
    assert config.rotary_scaling == yarn | {"original_max_position_embeddings": 32}
