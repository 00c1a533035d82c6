"""Rotary tables: values, and parameters that make no sense."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from quasar_trt.errors import QuasarError
from quasar_trt.model_config import ModelConfig
from quasar_trt.rope import inverse_frequencies, rope_tables

CONFIG = ModelConfig("LlamaForCausalLM", 24, 40, 2, 4, 2, 8, 50, 64, 1e-5, 10000.0)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


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
    ],
)
def test_parameters_that_make_no_sense_are_refused(scaling, words):
    with pytest.raises(QuasarError) as error:
        inverse_frequencies(scaled(**scaling))
    for word in words:
        assert word in str(error.value)
