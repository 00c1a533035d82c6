"""The model's own defaults: read, checked, used where nothing else was asked for."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tiny import tiny_checkpoint, write_engine_dir

from quasar_trt.errors import QuasarError
from quasar_trt.generation_config import GenerationConfig, sampling_text
from quasar_trt.recipe import Recipe
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

VALUES = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 7}
EXPECTED = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1, max_tokens=7)


def write(directory, values: dict) -> None:
    (directory / "generation_config.json").write_text(json.dumps(values))


def test_defaults_are_read_by_the_names_of_the_file(tmp_path):
    write(tmp_path, VALUES | {"do_sample": True, "eos_token_id": [2, 7], "top_h": None})
    read = GenerationConfig.read(tmp_path)
    assert read.eos_token_ids == (2, 7)
    assert SamplingParams(**read.sampling) == EXPECTED
    assert set(read.sampling) == {*VALUES, "max_tokens"} - {"max_new_tokens"}


def test_nothing_said_is_nothing_read(tmp_path):
    assert GenerationConfig.read(tmp_path) == GenerationConfig(None, {})
    write(tmp_path, {"temperature": None})
    assert GenerationConfig.read(tmp_path) == GenerationConfig(None, {})


def test_value_that_is_not_allowed_is_named(tmp_path):
    write(tmp_path, {"top_p": 1.5})
    with pytest.raises(QuasarError, match=r"\.json is damaged: top_p is 1\.5; allowed: .*build the engine again"):
        GenerationConfig.read(tmp_path)


def test_text_for_people():
    assert sampling_text({"temperature": 0.6, "top_k": 20}) == "temperature 0.6, top_k 20"


def test_runner_uses_them_unless_parameters_are_given(tmp_path):
    directory = write_engine_dir(tmp_path / "engine", *tiny_checkpoint(recipe=Recipe("none")))
    write(directory, VALUES)
    runner = Runner.from_dir(directory, engine="reference")
    assert runner.default_sampling_params == EXPECTED
    assert len(runner.generate([1, 2])[0].outputs[0].token_ids) == 7
    assert sum(len(piece.token_ids) for piece in runner.stream([1, 2])) == 7
    assert len(runner.generate([1, 2], SamplingParams(seed=1))[0].outputs[0].token_ids) == 16
    longer = dataclasses.replace(runner.default_sampling_params, max_tokens=9)
    assert len(runner.generate([1, 2], longer)[0].outputs[0].token_ids) == 9
