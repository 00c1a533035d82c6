"""The parts of the GPU check that run engines, on doubles: what is compared, what counts as a failure, what is built."""

from __future__ import annotations

import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from executor_double import executor_double
from llm_engines import retarget
from plan_double import CpuDevice
from stubs import StubEngine, random_logits
from tiny_plan import double_of, install, write_plan_dir

from quasar_trt.bench import gpu_engine_parts
from quasar_trt.bench.engine_comparison import EngineComparison, compare, logits_of
from quasar_trt.bench.gpu_engine_parts import EngineParts
from quasar_trt.bench.gpu_part import NotRun
from quasar_trt.engines import cuda_device, executor_session
from quasar_trt.engines.reference import ReferenceEngine
from quasar_trt.errors import QuasarError

VOCAB = 7
LOGITS = random_logits(VOCAB, seed=1)
PROMPTS = [[1, 2, 3, 4], [5]]


def stub(logits=LOGITS, **options) -> StubEngine:
    return StubEngine(logits, VOCAB, **options)


def test_logits_are_those_that_the_answer_follows():
    engine = stub(max_rows=3)
    rows = logits_of(engine, [1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4], max_draft_len=2)
    expected = [LOGITS((1, 2, 3, 4, 5, 6, *range(count))) for count in range(5)]
    np.testing.assert_array_equal(rows, np.array(expected))
    assert [len(step.tokens[0]) + len(step.drafts[0]) for step in engine.passes] == [3, 2, 3, 2]
    assert engine.caches == {}


def test_an_engine_equals_itself():
    found = compare(stub(), stub(), PROMPTS, max_tokens=12, max_draft_len=3)
    assert found == EngineComparison(num_prompts=2, num_equal=2, gap=0.0, kl=0.0, agreement=1.0, difference=0.0)
    assert found.failure == ""


def test_what_differs_is_measured_on_the_reference_engines_answers():
    offset = np.linspace(0, 0.01, VOCAB).astype(np.float32)
    found = compare(stub(lambda prefix: LOGITS(prefix) + offset), stub(), PROMPTS, max_tokens=12, max_draft_len=3)
    assert found.num_equal == 2 and found.failure == ""
    assert found.difference == pytest.approx(0.01, abs=1e-6) and 0 < found.kl < 1e-4


def test_ids_that_part_by_more_than_rounding_are_a_failure():
    other = random_logits(VOCAB, seed=2)
    found = compare(stub(other), stub(), PROMPTS, max_tokens=12, max_draft_len=3)
    assert found.num_equal < 2 and found.agreement < 1
    assert "ids part where the reference engine's logits are" in found.failure and "KL to the" in found.failure
    # The gap is that of the reference engine's own logits, where the ids part first.
    prefix, gaps = None, []
    for prompt in PROMPTS:
        prefix = tuple(prompt)
        while LOGITS(prefix).argmax() == other(prefix).argmax() and len(prefix) < len(prompt) + 12:
            prefix += (int(LOGITS(prefix).argmax()),)
        if len(prefix) < len(prompt) + 12:
            row = LOGITS(prefix)
            gaps.append(float(row.max() - row[other(prefix).argmax()]))
    assert found.gap == pytest.approx(max(gaps))


def test_engines_that_accept_inside_are_compared_by_their_ids():
    engine = stub()
    engine.capabilities = SimpleNamespace(**{**vars(engine.capabilities), "accepts_inside": True})
    found = compare(engine, stub(), PROMPTS, max_tokens=12, max_draft_len=3)
    assert found == EngineComparison(num_prompts=2, num_equal=2, gap=0.0)
    assert found.failure == "" and found.to_dict()["kl"] is None


@pytest.mark.parametrize("gap", [0.51, float("nan")])
def test_a_gap_beyond_the_allowed_is_a_failure(gap):
    assert "more than 0.5" in EngineComparison(2, 1, gap).failure


def test_states_that_are_far_away_are_a_failure():
    assert "hidden states are 0.201 of their size off, more than 0.2" in EngineComparison(2, 2, 0, states=0.201).failure


@pytest.fixture
def parts(engine_dirs, tmp_path, monkeypatch) -> EngineParts:
    """Of plans of the BF16 engine, on a double."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one, two, one, two"}\n{"prompt": "three"}\n')
    directory = write_plan_dir(engine_dirs["BF16"], tmp_path / "plan")
    install(monkeypatch, double_of(directory))
    monkeypatch.setattr(gpu_engine_parts, "need_gpu", lambda: None)
    monkeypatch.setattr(gpu_engine_parts, "load_stack", lambda stack: None)
    monkeypatch.setattr(gpu_engine_parts, "_TOKENS", 6)
    found = EngineParts("model", prompts, tmp_path, device="cpu")
    monkeypatch.setattr(found, "_engine_dir", lambda target, weights: directory)
    return found


def test_plans_are_compared_with_the_reference_engine(parts):
    """The double keeps float32 in its cache, the reference engine BF16: near ties may fall otherwise."""
    outcome = parts.target("tensorrt-rtx")
    assert outcome.failure == "" and set(outcome.figures) == {"BF16", "INT8"}
    for figures in outcome.figures.values():
        assert figures["num_prompts"] == 2 and figures["gap"] < 0.02
        assert 0 < figures["kl"] < 1e-3 and 0 < figures["difference"] < 0.1
        assert 0 < figures["states"] < 0.01
    (table,) = outcome.tables
    assert [row[0] for row in table.rows] == ["BF16", "INT8"] and table.rows[0][1:] == table.rows[1][1:]


def test_engines_of_tensorrt_llm_are_compared_by_their_ids(parts, engine_dirs, tmp_path, monkeypatch):
    directory = retarget(shutil.copytree(engine_dirs["BF16"], tmp_path / "llm"))
    monkeypatch.setattr(parts, "_engine_dir", lambda target, weights: directory)
    monkeypatch.setattr(gpu_engine_parts, "llm_release", lambda: "1.2.1")
    monkeypatch.setattr(executor_session, "llm_release", lambda: "1.2.1")
    monkeypatch.setattr(executor_session, "CudaDevice", lambda number: CpuDevice(sm=90))
    with executor_double(ReferenceEngine.from_dir(directory).model):
        outcome = parts.target("tensorrt-llm")
    assert outcome.failure == ""
    for figures in outcome.figures.values():  # a cache of float32 here too
        assert figures["num_prompts"] == 2 and figures["gap"] < 0.02 and figures["kl"] is None


def test_the_reference_engine_is_compared_with_itself(parts):
    assert parts.reference().figures["INT8"]["difference"] == 0


def test_the_four_cells_run_on_what_was_built(parts, monkeypatch):
    report = SimpleNamespace(to_dict=lambda: {"cells": 4}, tables=lambda: ["a table"])
    calls = []
    monkeypatch.setattr(gpu_engine_parts, "run_bench", lambda *arguments: calls.append(arguments) or report)
    outcome = parts.cells("tensorrt-rtx")
    assert (outcome.figures, outcome.tables) == ({"cells": 4}, ["a table"])
    directories, prompts, _, _ = calls[0]
    assert set(directories) == {"BF16", "INT8"} and [prompt.text for prompt in prompts][1] == "three"


def test_a_missing_stack_is_told(parts, monkeypatch):
    def missing(stack):
        raise QuasarError(f"the package {stack} is needed")

    monkeypatch.setattr(gpu_engine_parts, "load_stack", missing)
    for part in (parts.target, parts.cells):
        with pytest.raises(NotRun, match="the package tensorrt is needed"):
            part("tensorrt")
        with pytest.raises(NotRun, match="the package tensorrt-llm is needed"):
            part("tensorrt-llm")


def test_engines_are_built_once_for_the_gpu_that_is_there(tmp_path, monkeypatch):
    commands = []

    def run(command, **options):
        commands.append(command[3:])
        failed = "none" in command
        return SimpleNamespace(returncode=int(failed), stderr="warning: x\nerror: no room\n" if failed else "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(cuda_device, "CudaDevice", lambda: CpuDevice(sm=89))
    parts = EngineParts("a model", tmp_path / "p", tmp_path)
    for _ in range(2):
        assert parts._engine_dir("tensorrt-rtx", "INT8") == tmp_path / "tensorrt-rtx-int8"
    (command,) = commands
    assert command[0] == "build" and command[-2:] == ["--", "a model"]
    assert command[command.index("--sm") + 1] == "89" and "--calib-size" in command
    parts._engine_dir("tensorrt", "INT8")
    assert "--sm" not in commands[-1]
    with pytest.raises(RuntimeError, match="tensorrt, BF16 cannot be built: error: no room"):
        parts._engine_dir("tensorrt", "BF16")
