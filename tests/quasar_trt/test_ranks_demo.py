"""The demo model on three ranks, which divide its nine heads: its answers are those of one process."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from mpi import TESTS, run_ranks, split
from rank_answers import answers

from quasar_trt.builders import build as build_module
from quasar_trt.recipe import Recipe

PROMPTS = Path(__file__).parents[2] / "examples" / "prompts.jsonl"


@pytest.fixture(scope="module")
def found(demo_gguf, tmp_path_factory) -> dict[int, dict]:
    """Number of ranks -> engine -> what `rank_answers` finds of three prompts."""
    root = tmp_path_factory.mktemp("demo")
    text = root / "calibration.txt"
    text.write_text("The weights of a model are read once for each step.\n" * 20)
    options = {"calib_dataset": text, "calib_size": 2, "calib_max_seq_length": 64, "progress": False}
    with pytest.MonkeyPatch.context() as patch:  # nothing here asks for fidelity, and measuring it takes longest
        texts_of = build_module.calibration_texts
        patch.setattr(build_module, "calibration_texts", lambda *arguments: texts_of(*arguments[:-1], False))
        build_module.build(str(demo_gguf), root / "1" / "int8", Recipe(smoothquant=0.5, rotate=True), **options)
        build_module.build(str(demo_gguf), root / "1" / "bf16", Recipe("none"), progress=False)
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    prompts = root / "prompts.json"
    prompts.write_text(json.dumps(texts[::7]))
    directories = {size: [root / str(size) / name for name in ("int8", "bf16")] for size in (1, 3)}
    for one, three in zip(*directories.values(), strict=True):
        split(one, three, 3)
    output = root / "three.pickle"
    done = run_ranks(3, TESTS / "rank_answers.py", output, prompts, *directories[3])
    assert done.returncode == 0, done.stderr
    return {1: answers(prompts, directories[1]), 3: pickle.loads(output.read_bytes())}


def test_int8_answers_and_logits_have_the_bits_of_one_process(found):
    one, three = found[1]["int8"], found[3]["int8"]
    assert three["plain"] == one["plain"] and three["drafted"] == one["plain"]
    assert np.array_equal(three["logits"], one["logits"])


def test_bf16_answers_part_only_where_two_logits_are_all_but_equal(found):
    """The float sums of three ranks are ordered differently. How many of the prompts part is shown with -rP."""
    one, three = found[1]["bf16"], found[3]["bf16"]
    assert three["drafted"] == three["plain"]
    assert np.abs(three["logits"] - one["logits"]).mean() < 0.02
    parted = 0
    for ids, expected, gaps in zip(three["plain"], one["plain"], one["gaps"], strict=True):
        at = next((i for i, pair in enumerate(zip(ids, expected, strict=False)) if pair[0] != pair[1]), None)
        if at is not None:
            parted += 1
            assert gaps[at] <= 1e-3
    print(f"{parted} of {len(one['plain'])} prompts part")
