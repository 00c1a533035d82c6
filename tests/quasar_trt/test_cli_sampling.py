"""Sampling parameters on the command line: every one has an option, the model's defaults stand where none is given."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields

import click
import pytest

from quasar_trt.cli import chat, generate
from quasar_trt.errors import QuasarError
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams


def run(command: str, *args) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "quasar_trt.cli", command, *map(str, args)]
    return subprocess.run(line, capture_output=True, encoding="utf-8", env=os.environ, check=True)


def given(command: click.Command, *args: str) -> dict:
    """What the command's sampling options make of `args`."""
    names = {field.name for field in fields(SamplingParams)}
    values = command.make_context("test", ["d", *args]).params
    return {name: value for name, value in values.items() if name in names and value not in (None, ())}


def test_every_parameter_has_an_option():
    names = {field.name for field in fields(SamplingParams)} - {"logits_processors"}  # callables have no spelling
    assert names <= {param.name for param in generate.params}
    assert names - {param.name for param in chat.params} == {"n", "logprobs", "prompt_logprobs"}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], {}),
        (["--stop", "a", "--stop", "b c"], {"stop": ("a", "b c")}),
        (["--stop-token-ids", "5", "--allowed-token-ids", "6"], {"stop_token_ids": (5,), "allowed_token_ids": (6,)}),
        (["--logit-bias", "5=-100", "--logit-bias", "6=0.5"], {"logit_bias": ((5, -100.0), (6, 0.5))}),
        (["--no-skip-special-tokens", "--ignore-eos"], {"skip_special_tokens": False, "ignore_eos": True}),
        (["--temperature", "0", "--top-k", "0"], {"temperature": 0.0, "top_k": 0}),
    ],
)
def test_only_what_is_given_counts(args, expected):
    assert given(generate, "hello", *args) == expected


def test_completions_and_log_probabilities_are_printed(engine_dirs):
    directory = engine_dirs["BF16"]
    common = ["--seed", 5, "--max-tokens", 4, "--logprobs", 1, "--no-stats"]
    params = SamplingParams(seed=5, max_tokens=4, logprobs=1)
    completion = Runner.from_dir(directory).generate("hello", params)[0].outputs[0]
    lines = run("generate", directory, "hello", *common).stdout.removeprefix(completion.text + "\n").splitlines()
    entries = [list(entry.values()) for entry in completion.logprobs]
    assert lines == [
        "\t".join(f"{each.decoded_token!r} {each.logprob:.4f} #{each.rank}" for each in entry) for entry in entries
    ]

    both = run("generate", directory, "hello", *common, "--n", 2, "--prompt_logprobs", 0).stdout
    assert both.index("'e' ") < both.index(f"--- 1 of 2\n{completion.text}\n") < both.index("--- 2 of 2\n")


def test_defaults_of_the_model_are_used_and_shown(engine_dirs, tmp_path):
    directory = tmp_path / "engine"
    shutil.copytree(engine_dirs["BF16"], directory)
    path = directory / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.1, "top_k": 3, "max_new_tokens": 5}))
    params = SamplingParams(temperature=0.1, top_k=2, max_tokens=5, seed=1, ignore_eos=True)
    expected = Runner.from_dir(directory).generate("hello", params)[0].outputs[0].text
    result = run("generate", directory, "hello", "--seed", 1, "--top_k", 2, "--ignore-eos")
    assert result.stdout == expected + "\n"
    assert "note: the model's own sampling parameters: temperature 0.1, max_tokens 5\n" in result.stderr
    shown = " ".join(run("info", directory).stdout.split())
    assert "sampling defaults temperature 0.1, top_k 3, max_tokens 5" in shown


@pytest.mark.parametrize(("text", "expected"), [("1000", 1000), ("2K", 2048), ("1.5M", 1572864), ("3g", 3 * 2**30)])
def test_memory_is_given_in_bytes_or_powers_of_1024(text, expected):
    for command in (generate, chat):
        option = next(option for option in command.params if option.name == "kv_cache_memory_bytes")
        assert option.type.convert(text, option, None) == expected


@pytest.mark.parametrize("text", ["much", "2T", "K", "1.5"])
def test_other_memory_is_refused(text):
    option = next(option for option in chat.params if option.name == "kv_cache_memory_bytes")
    with pytest.raises(QuasarError, match=f"--kv-cache-memory-bytes is '{text}'; allowed: bytes, or a number with"):
        option.type.convert(text, option, None)
