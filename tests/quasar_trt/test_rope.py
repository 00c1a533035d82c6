"""Rotary tables: values, and parameters that make no sense."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tiny import LLAMA3, TRANSFORMERS, rope_fields
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quasar_trt.errors import QuasarError
from quasar_trt.model_config import ModelConfig
from quasar_trt.rope import attention_factor, inverse_frequencies, longest_sequence, rope_tables

CONFIG = ModelConfig("LlamaForCausalLM", 24, 40, 2, 4, 2, 8, 50, 64, 1e-5, 10000.0)


def scaled(**scaling) -> ModelConfig:
    return dataclasses.replace(CONFIG, rotary_scaling=scaling)


def test_frequencies_fall_by_the_base():
    assert np.allclose(inverse_frequencies(CONFIG), [1, 0.1, 0.01, 0.001], rtol=1e-6)
    cos, sin = rope_tables(CONFIG, 3)
    assert cos.shape == sin.shape == (3, 4)
    assert np.allclose(sin[2], np.sin([2, 0.2, 0.02, 0.002]), rtol=1e-6)


def test_both_spellings_scale_alike():
    expected = inverse_frequencies(CONFIG) / 4
    assert np.array_equal(inverse_frequencies(scaled(rope_type="linear", factor=4)), expected)
    assert np.array_equal(inverse_frequencies(scaled(type="linear", factor=4.0)), expected)


def test_llama3_divides_only_the_slow_frequencies():
    # wavelengths 6.3 (above 64 / 4 turns: kept), 62.8 (between: blended), 628 and 6283 (divided by 8)
    smooth = (64 / (20 * np.pi) - 1) / 3
    expected = [1, (1 - smooth) * 0.1 / 8 + smooth * 0.1, 0.01 / 8, 0.001 / 8]
    assert np.allclose(inverse_frequencies(scaled(**LLAMA3)), expected, rtol=1e-6)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        LLAMA3,
        {"rope_type": "dynamic", "factor": 8.0},
        YARN,
        YARN | {"original_max_position_embeddings": None, "factor": 2.5},
        YARN | {"factor": None},
        YARN | {"factor": 0.5},
        YARN | {"attention_factor": 1.25},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
        YARN | {"mscale": 0.7},
        YARN | {"mscale": 0, "mscale_all_dim": 1.0},
        YARN | {"beta_fast": 16, "beta_slow": 2},
        YARN | {"truncate": False},
        YARN | {"beta_fast": 5.0, "beta_slow": 5.0, "truncate": False},
        YARN | {"original_max_position_embeddings": 4},  # the ramp starts below dimension 0
    ],
)
@pytest.mark.parametrize(("head_size", "base"), [(64, 10000.0), (6, 10000.0), (128, 1e6)])
def test_tables_equal_those_of_transformers_up_to_the_last_position(scaling, head_size, base):
    given = {key: value for key, value in scaling.items() if value is not None or key == "factor"}
    if TRANSFORMERS < 5 and given.get("factor", 0) is None:
        given["factor"] = 512 / given["original_max_position_embeddings"]  # what transformers 5 takes it for
    config = LlamaConfig(head_dim=head_size, max_position_embeddings=512, **rope_fields(**given, rope_theta=base))
    ours = dataclasses.replace(
        CONFIG, head_size=head_size, max_position_embeddings=512, rotary_base=base, rotary_scaling=scaling
    )
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(512)[None])
    for found, theirs in zip(rope_tables(ours, 512), expected, strict=True):
        # up to three steps of float32 (2^-24) in a frequency and in an angle of up to 512
        np.testing.assert_allclose(found, theirs[0, :, : head_size // 2].numpy(), atol=1e-4)


def test_only_yarn_has_an_attention_factor():
    assert attention_factor(CONFIG) == attention_factor(scaled(**LLAMA3)) == 1.0
    assert attention_factor(scaled(**YARN)) == pytest.approx(0.1 * np.log(4) + 1)
    cos, sin = rope_tables(scaled(**YARN), 3)
    assert np.allclose(cos**2 + sin**2, attention_factor(scaled(**YARN)) ** 2)


def test_dynamic_is_plain_and_ends_at_its_original_maximum():
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    assert np.array_equal(inverse_frequencies(scaled(**dynamic)), inverse_frequencies(CONFIG))
    assert longest_sequence(scaled(**dynamic)) == longest_sequence(CONFIG) == 64
    assert longest_sequence(scaled(**dynamic, original_max_position_embeddings=16)) == 16
    assert longest_sequence(scaled(**YARN)) == 64


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "longrope"}, ["unknown rope type 'longrope'", "linear"]),
        ({"rope_type": 3}, ["unknown rope type '3'"]),
        ({"type": ["linear"]}, ["unknown rope type"]),
        ({"rope_type": "linear"}, ["'factor' of rope type 'linear' is None"]),
        ({"rope_type": "linear", "factor": 0}, ["is 0", "above 0"]),
        ({"rope_type": "linear", "factor": True}, ["is True"]),
        (LLAMA3 | {"factor": float("nan")}, ["is nan"]),
        (LLAMA3 | {"low_freq_factor": 4.0}, ["is 4.0", "below 'high_freq_factor', 4.0"]),
        (LLAMA3 | {"original_max_position_embeddings": "64"}, ["is '64'"]),
        (YARN | {"factor": "4"}, ["'factor' of rope type 'yarn' is '4'"]),
        (YARN | {"beta_fast": -1}, ["'beta_fast' of rope type 'yarn' is -1"]),
        (YARN | {"truncate": "no"}, ["'truncate' of rope type 'yarn' is 'no'"]),
    ],
)
def test_parameters_that_make_no_sense_are_refused(scaling, words):
    with pytest.raises(QuasarError) as error:
        rope_tables(scaled(**scaling), 1)
    for word in words:
        assert word in str(error.value)


def test_yarn_needs_a_base_above_1():
    with pytest.raises(QuasarError, match=r"rotary_base is 1\.0"):
        rope_tables(dataclasses.replace(scaled(**YARN), rotary_base=1), 1)
