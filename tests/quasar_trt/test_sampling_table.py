"""Each cell of the table in docs/sampling.md: the parameter acts, and drafting changes nothing about what it gives."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from quasar_trt.drafters.registry import DRAFTERS, OPERANDS, make_drafter
from quasar_trt.engines import ENGINES
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "sampling.md"
PROMPT = "one two one two one"
EOS = 256
BASE = {"max_tokens": 24, "seed": 1, "top_k": 4, "ignore_eos": True}


def only_even(_ids, row):
    row[1::2] = -np.inf
    return row


def end_fourth(ids, row):
    row[EOS] += 100.0 if len(ids) == 3 else 0.0
    return row


# parameter -> (what it is set to, what else is set, in the run without it too)
CASES = {
    "n": (2, {"temperature": 1.0}),
    "presence_penalty": (2.0, {}),
    "frequency_penalty": (2.0, {}),
    "repetition_penalty": (1.8, {}),
    "temperature": (1.7, {}),
    "top_p": (0.4, {"temperature": 2.0}),
    "top_k": (2, {"temperature": 2.0}),
    "min_p": (0.6, {"temperature": 2.0}),
    "seed": (7, {"temperature": 1.0}),
    "stop": ("text", {}),
    "stop_token_ids": ("ids", {}),
    "bad_words": ("words", {}),
    "ignore_eos": (False, {"logits_processors": [end_fourth]}),
    "max_tokens": (5, {}),
    "min_tokens": (9, {"ignore_eos": False, "logits_processors": [end_fourth]}),
    "logprobs": (2, {}),
    "prompt_logprobs": (1, {}),
    "logit_bias": ("bias", {}),
    "allowed_token_ids": ([10, 20, 30, 40, 50], {}),
    "skip_special_tokens": (False, {"logits_processors": [end_fourth]}),
    "include_stop_str_in_output": (True, {"stop": "text"}),
    "logits_processors": ([only_even], {}),
}


def table() -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """The (drafter, engine) of each column, and the cells of each parameter, default first."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    begin = next(index for index, line in enumerate(lines) if line.startswith("| parameter |"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[begin:]]
    count = next(index for index, row in enumerate(rows) if index > 1 and not row[0].startswith("`"))
    columns = [tuple(re.fullmatch(r"(\w+) on (\w+)", cell).groups()) for cell in rows[0][2:]]
    return columns, {row[0].strip("`"): row[1:] for row in rows[2:count]}


COLUMNS, ROWS = table()
# The others need a GPU. Every parameter acts on rows of logits, which tensorrt gives as these do; for tensorrt_llm see
# test_executor_requests.py.
HERE = set(ENGINES) - {"tensorrt", "tensorrt_llm"}


@pytest.fixture(scope="module")
def runners(engine_dirs, head_dirs):
    """(drafter, engine) -> runner that verifies every draft whole; drafter None for plain decoding."""
    plain = {name: Runner.from_dir(engine_dirs["INT8"], drafter=None, engine=name, threads=1) for name in HERE}

    operands = {"engine": engine_dirs["BF16"], **head_dirs}

    def runner(drafter: str | None, engine: str) -> Runner:
        opened = plain[engine]
        return Runner(
            opened.engine,
            tokenizer=opened.tokenizer,
            eos_token_ids=opened.eos_token_ids,
            drafter=make_drafter(
                f"{drafter}:{operands[drafter]}" if drafter in OPERANDS else drafter,
                drafter and {"num_speculative_tokens": 4},
            ),
        )

    return runner


def result(runner: Runner, params: SamplingParams):
    """What a caller sees of a completion: ids, reasons, texts, and the log probabilities with their tokens."""
    (output,) = runner.generate(PROMPT, params)
    seen = [(each.token_ids, each.finish_reason, each.stop_reason, each.text) for each in output.outputs]
    scored = [output.prompt_logprobs, *(each.logprobs for each in output.outputs)]
    entries = [entry for entries in scored for entry in filter(None, entries or ())]
    seen.append([list(entry) for entry in entries])
    return seen, [each.logprob for entry in entries for each in entry.values()]


def settings(name: str, runner: Runner, temperature: float) -> tuple[dict, dict]:
    """The parameters without and with the one in question; some values come out of the run without it."""
    value, others = CASES[name]
    others = {"temperature": temperature} | others
    common = BASE | others
    completion = runner.generate(PROMPT, SamplingParams(**common | {"stop": None}))[0].outputs[0]
    text = next((letter for letter in completion.text[1:] if letter.isascii() and letter.isprintable()), None)
    ids = completion.token_ids
    values = {"text": text, "words": [text], "ids": [ids[2]], "bias": {ids[0]: -100.0}}
    replaced = {key: values[item] if isinstance(item, str) and item in values else item for key, item in common.items()}
    return replaced, replaced | {name: values[value] if isinstance(value, str) and value in values else value}


def test_table_names_every_parameter_with_its_default_and_every_drafter_on_every_engine():
    defaults = {field.name: str(field.default) for field in dataclasses.fields(SamplingParams)}
    assert {name: cells[0] for name, cells in ROWS.items()} == defaults
    assert set(CASES) == set(defaults)
    assert set(COLUMNS) == {(drafter, engine) for drafter in DRAFTERS for engine in HERE}
    for cells in ROWS.values():
        assert cells[1:] == ["distribution" if drafter == "engine" else "ids" for drafter, _ in COLUMNS]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("drafter", "engine"), COLUMNS)
def test_parameter_acts_and_drafting_changes_nothing(runners, drafter, engine, name, temperature):
    plain = runners(None, engine)
    without, with_it = settings(name, plain, temperature)
    expected = result(plain, SamplingParams(**with_it))
    assert expected != result(plain, SamplingParams(**without))
    drafting = runners(drafter, engine)
    if drafter == "engine" and SamplingParams(**with_it).temperature > 0:  # other ids of the same distribution
        without, with_it = settings(name, drafting, temperature)
        assert result(drafting, SamplingParams(**with_it)) != result(drafting, SamplingParams(**without))
        assert drafting.stats.num_accepted_tokens
        return
    seen, logprobs = result(drafting, SamplingParams(**with_it))
    assert seen == expected[0]
    np.testing.assert_allclose(logprobs, expected[1], rtol=0, atol=0 if drafting.engine.capabilities.exact else 1e-4)
    assert drafting.stats.num_draft_tokens
