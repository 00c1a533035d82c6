"""The benchmark: prompts, figures from known runs, and all four cells on tiny engines."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from stubs import StubEngine, one_hot_logits

from quasar_trt.bench.cell import CELLS, CellProcess, Measurement, verify_costs
from quasar_trt.bench.cell_figures import Run
from quasar_trt.bench.options import BenchOptions
from quasar_trt.bench.prompts import load_prompts, random_prompts
from quasar_trt.bench.report import Report
from quasar_trt.bench.run import run_bench
from quasar_trt.errors import QuasarError
from quasar_trt.sampling_params import SamplingParams

BF16_PLAIN, BF16_DRAFTED, INT8_PLAIN, INT8_DRAFTED = CELLS


def write_prompts(path: Path, *lines: dict | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def text_of(report: Report) -> str:
    console = Console(width=80, file=io.StringIO())
    for table in report.tables():
        console.print(table.terminal(), "")
    return console.file.getvalue()


def test_cells_are_weights_times_drafting():
    assert [cell.name for cell in CELLS] == ["BF16 plain", "BF16 drafted", "INT8 plain", "INT8 drafted"]


def test_prompts_of_every_form_are_read(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write_prompts(
        tmp_path / "p.jsonl",
        {"prompt": "one"},
        {"task": "qa", "turns": ["two", "never used"], "answer": 5},
        "",
        {"task": "chat", "messages": messages},
    )
    prompts = load_prompts(path)
    assert [prompt.task for prompt in prompts] == ["prompts", "qa", "chat"]
    assert [prompt.text for prompt in prompts] == ["one", "two", "Be brief.\n\nHi"]
    assert prompts[1].messages == ({"role": "user", "content": "two"},)
    assert list(prompts[2].messages) == messages


def test_limit_per_task_keeps_the_first_of_each_task(tmp_path):
    lines = [{"task": task, "prompt": f"{task}{i}"} for i in range(3) for task in "ab"]
    prompts = load_prompts(write_prompts(tmp_path / "p.jsonl", *lines), limit_per_task=2)
    assert [prompt.text for prompt in prompts] == ["a0", "b0", "a1", "b1"]


def test_a_prompt_may_hold_every_line_separator_of_unicode(tmp_path):
    text = "one\u2028two\u2029three\x85four"
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [prompt.text for prompt in load_prompts(path)] == [text]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "hold no line"),
        (["{"], "line 1 is not JSON"),
        ([{"prompt": "x"}, {"text": "x"}], "line 2 holds no text under"),
        ([{"prompt": ""}], "line 1 holds no text"),
        ([{"turns": []}], "line 1 holds no text"),
        ([{"messages": [{"role": "user"}]}], "line 1 holds no text"),
        (["[1]"], "line 1 holds no text"),
    ],
)
def test_unusable_prompts_are_refused_by_line(lines, message, tmp_path):
    with pytest.raises(QuasarError, match=message):
        load_prompts(write_prompts(tmp_path / "p.jsonl", *lines))


def test_options_are_checked():
    with pytest.raises(QuasarError, match="drafter is 'none'"):
        BenchOptions(drafter="none")
    with pytest.raises(QuasarError, match="repeats is 0"):
        BenchOptions(repeats=0)
    with pytest.raises(QuasarError, match="random_prompts is -1"):
        BenchOptions(random_prompts=-1)
    with pytest.raises(QuasarError, match="unknown bench option 'repeat'"):
        BenchOptions(repeat=2)


def known_report(drafted_ids=(1, 2, 3, 4)) -> Report:
    """Two tasks, three repeats; seconds per cell are chosen so that every figure is known."""
    seconds = {BF16_PLAIN: (4.0, 4.0, 4.0), BF16_DRAFTED: (2.0, 2.0, 2.0), INT8_PLAIN: (2.0, 2.5, 1.6)}
    seconds[INT8_DRAFTED] = (1.0, 0.8, 2.0)
    runs = [
        Run(
            cell,
            task,
            index,
            repeat,
            7,
            Measurement(
                token_ids=drafted_ids if cell == INT8_DRAFTED else (1, 2, 3, 4),
                decode_tokens=3,
                decode_seconds=seconds[cell][repeat],
                num_verify_steps=2 if cell.drafted else 4,
                seconds={"draft": 1.0, "verify": 8.0, "accept": 1.0},
            ),
        )
        for repeat in range(3)
        for index, task in enumerate(("chat", "translation"))
        for cell in CELLS
    ]
    return Report(
        BenchOptions(),
        {"BF16": Path("b"), "INT8": Path("i")},
        tuple(runs),
        {cell: 269_000_000 if cell.weights == "BF16" else 163_000_000 for cell in CELLS},
        dict.fromkeys(CELLS, 400_000_000),
        {cell: {1: 0.004, 2: 0.004, 3: 0.0042, 5: 0.005, 8: 0.008} for cell in CELLS},
    )


def test_speed_is_decode_tokens_over_decode_seconds():
    report = known_report()
    assert report.speed(BF16_PLAIN) == pytest.approx(3 / 4)
    assert report.speed(INT8_PLAIN) == pytest.approx(9 / 6.1)
    assert report.speed(INT8_PLAIN, "translation") == pytest.approx(9 / 6.1)


def test_speedups_are_paired_within_a_repeat():
    report = known_report()
    assert report.speedups(BF16_PLAIN) == [1.0, 1.0, 1.0]
    assert report.speedups(INT8_PLAIN) == pytest.approx([2.0, 1.6, 2.5])
    assert report.speedups(INT8_DRAFTED, "chat") == pytest.approx([4.0, 5.0, 2.0])
    assert report.to_dict()["cells"]["INT8 plain"]["speedup"] == pytest.approx(2.0)  # the median


def test_acceptance_identity_and_shares():
    report = known_report()
    assert report.mean_acceptance_length(BF16_PLAIN) == 1.0
    assert report.mean_acceptance_length(INT8_DRAFTED) == 2.0
    assert report.identical(INT8_DRAFTED) == (6, 6)
    assert report.shares(INT8_DRAFTED) == pytest.approx({"draft": 0.1, "verify": 0.8, "accept": 0.1})
    assert known_report(drafted_ids=(1, 2, 9)).identical(INT8_DRAFTED) == (0, 6)


def test_a_speed_that_was_not_measured_is_none():
    report = known_report()
    runs = [
        Run(r.cell, r.task, r.prompt, r.repeat, 7, Measurement((1,), 0, 0.0, 1, r.measurement.seconds))
        for r in report.runs
    ]
    empty = dataclasses.replace(report, runs=tuple(runs))
    assert empty.speed(INT8_PLAIN) is None and empty.speedups(INT8_PLAIN) == []
    assert empty.to_dict()["cells"]["INT8 plain"]["speedup"] is None
    assert "INT8 drafted" in text_of(empty)


def test_table_shows_the_figures_within_80_columns():
    text = text_of(known_report())
    assert max(map(len, text.splitlines())) <= 80
    rows = [line for line in text.splitlines() if line.startswith("INT8 drafted")]
    for figure in ("4.00x (2.00..5.00)", "2.00", "163 MB", "400 MB", "6/6"):
        assert figure in rows[0]
    for figure in ("10.0%", "80.0%", "1.05x", "1.25x", "2.00x"):
        assert figure in rows[1]
    by_task = [line.split() for line in text.splitlines() if line.startswith("translation")]
    assert by_task[0] == ["translation", "0.8", "2.00x", "2.00x", "4.00x"]
    assert by_task[1] == ["translation", "3.0", "(1.5..3.8)", "2.00", "10.0%", "80.0%", "10.0%"]
    assert by_task[2][:3] == ["translation", "1", "1.71x"]
    mean = next(line.split() for line in text.splitlines() if line.startswith("mean of the tasks"))
    assert mean[-3:] == ["2.00x", "2.00x", "4.00x"]
    assert "…" not in text


def test_mean_over_tasks_weighs_tasks_alike():
    """Speed-ups of INT8 drafted: chat 4, 5, 2 (median 4), translation half of that (median 2)."""
    report = known_report()
    slower = [
        dataclasses.replace(run, measurement=dataclasses.replace(run.measurement, decode_seconds=seconds))
        for run in report.runs
        for seconds in [run.measurement.decode_seconds * (2 if run.cell.drafted and run.task == "translation" else 1)]
    ]
    report = dataclasses.replace(report, runs=tuple(slower))
    assert report.mean_speedup_of_tasks(INT8_DRAFTED) == pytest.approx(3.0)
    assert report.mean_speedup_of_tasks(INT8_PLAIN) == pytest.approx(2.0)


def test_drafting_gain_is_paired_within_a_repeat_and_averaged_per_prompt():
    """INT8 drafted over plain: 2.0 / 1.0, 2.5 / 0.8 and 1.6 / 2.0 seconds in the three repeats of each prompt."""
    gain = (2.0 * 3.125 * 0.8) ** (1 / 3)
    report = known_report()
    assert report.drafting_gains("INT8") == pytest.approx([gain, gain])
    assert report.drafting_gains("INT8", "chat") == pytest.approx([gain])
    assert report.drafting_gains("BF16") == pytest.approx([2.0, 2.0])
    saved = report.to_dict()["drafting_gain"]["INT8"]["all"]
    assert saved["geometric_mean"] == pytest.approx(gain) and saved["interval_95"] == pytest.approx((gain, gain))
    assert report.to_dict()["drafting_gain"]["INT8"]["tasks"]["chat"]["interval_95"] is None


def test_ids_that_differ_from_plain_stand_out():
    report = known_report(drafted_ids=(1, 2, 9))
    assert "**0/6**" in report.tables()[0].markdown() and "| 6/6 |" in report.tables()[0].markdown()


def test_plot_is_a_png_with_and_without_figures(tmp_path):
    from quasar_trt.bench.plot import plot

    nothing = [
        dataclasses.replace(run, measurement=dataclasses.replace(run.measurement, decode_seconds=0.0))
        for run in known_report().runs
    ]
    for report in (known_report(), dataclasses.replace(known_report(), runs=tuple(nothing))):
        plot(report, CELLS[1:], tmp_path / "speed.png")
        assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_four_cells_on_tiny_engines(engine_dirs, tmp_path):
    path = write_prompts(tmp_path / "p.jsonl", {"task": "a", "prompt": "abcabcabc"}, {"task": "b", "prompt": "hello"})
    options = BenchOptions(repeats=2, max_tokens=12, ignore_eos=True, threads=1)
    report = run_bench(engine_dirs, load_prompts(path), options, Console(quiet=True))
    assert len(report.runs) == 2 * 2 * 4
    for cell in CELLS:
        assert all(len(run.measurement.token_ids) == 12 for run in report.select(cell))
        assert report.identical(cell) == (4, 4)
        assert report.speed(cell) > 0 and report.peak_memory[cell] > 1_000_000
        assert sum(report.shares(cell).values()) == pytest.approx(1)
        assert report.relative_verify_costs(cell)[1] == 1 and report.relative_verify_costs(cell)[8] > 0
    assert report.mean_acceptance_length(BF16_PLAIN) == report.mean_acceptance_length(INT8_PLAIN) == 1.0
    assert report.weight_bytes[INT8_PLAIN] < report.weight_bytes[BF16_PLAIN]
    values = json.loads(json.dumps(report.to_dict()))
    assert set(values) == {
        "definition",
        "environment",
        "options",
        "engines",
        "cells",
        "tasks",
        "drafting_gain",
        "runs",
    }
    assert set(values["tasks"]) == {"a", "b"} and len(values["runs"]) == 16


def test_random_prompts_are_seeded_and_repeat_no_id():
    prompts = random_prompts(3, seed=5, vocab_size=1000, max_seq_len=512)
    assert prompts == random_prompts(3, seed=5, vocab_size=1000, max_seq_len=512)
    assert prompts != random_prompts(3, seed=6, vocab_size=1000, max_seq_len=512)
    for prompt in prompts:
        assert len(prompt.ids) == len(set(prompt.ids)) == 128 and set(prompt.ids) <= set(range(1000))
    assert prompts[0].ids != prompts[1].ids
    assert len(random_prompts(1, 0, vocab_size=100, max_seq_len=512)[0].ids) == 100
    assert len(random_prompts(1, 0, vocab_size=100, max_seq_len=9)[0].ids) == 4


def test_random_prompts_come_after_the_given_ones_as_a_task_of_their_own(engine_dirs, tmp_path):
    prompts = load_prompts(write_prompts(tmp_path / "p.jsonl", {"task": "a", "prompt": "abc"}))
    options = BenchOptions(repeats=1, max_tokens=3, ignore_eos=True, random_prompts=2, threads=1)
    report = run_bench(engine_dirs, prompts, options, Console(quiet=True))
    assert [(run.task, run.prompt) for run in report.select(INT8_PLAIN)] == [
        ("a", 0),
        ("random ids", 1),
        ("random ids", 2),
    ]
    assert {run.num_prompt_tokens for run in report.select(INT8_PLAIN, "random ids")} == {128}


def test_a_cell_is_open_before_the_next_one_starts(engine_dirs, tmp_path, monkeypatch):
    """What a runner times when it opens must not be disturbed by another cell; nor may a prompt run before all are open."""
    calls = []

    class Watched(CellProcess):
        def __init__(self, cell, *args):
            calls.append(("start", cell))
            super().__init__(cell, *args)

        def weight_bytes_per_step(self):
            calls.append(("open", self.cell))
            return super().weight_bytes_per_step()

        def measure(self, *args):
            calls.append(("measure", self.cell))
            return super().measure(*args)

    monkeypatch.setattr("quasar_trt.bench.run.CellProcess", Watched)
    prompts = load_prompts(write_prompts(tmp_path / "p.jsonl", {"prompt": "abc"}))
    run_bench(engine_dirs, prompts, BenchOptions(repeats=1, max_tokens=2, threads=1), Console(quiet=True))
    opening = [(what, cell) for cell in CELLS for what in ("start", "open")]
    assert calls == opening + [("measure", cell) for cell in CELLS] * 2  # the warm-up and one repeat


def test_cells_must_hold_the_weights_of_their_name(engine_dirs, tmp_path):
    prompts = load_prompts(write_prompts(tmp_path / "p.jsonl", {"prompt": "x"}))
    swapped = {"BF16": engine_dirs["INT8"], "INT8": engine_dirs["INT8"]}
    with pytest.raises(QuasarError, match="holds INT8 weights; --bf16 needs BF16"):
        run_bench(swapped, prompts, BenchOptions(), Console(quiet=True))


def altered(directory: Path, copy: Path, name: str, change) -> Path:
    """A copy of an engine directory whose JSON file `name` went through `change`."""
    shutil.copytree(directory, copy)
    values = json.loads((copy / name).read_text())
    change(values)
    (copy / name).write_text(json.dumps(values))
    return copy


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "checkpoint/config.json",
            lambda values: values["quasar"]["model"].update(rotary_base=5e5),
            "different models",
        ),
        ("tokenizer.json", lambda values: values["model"]["vocab"].update({"!": 256}), "different tokenizers"),
    ],
    ids=["model", "tokenizer"],
)
def test_engines_of_two_models_are_refused_before_they_are_opened(
    name, change, message, engine_dirs, tmp_path, no_cells
):
    other = engine_dirs | {"BF16": altered(engine_dirs["BF16"], tmp_path / "other", name, change)}
    prompts = load_prompts(write_prompts(tmp_path / "p.jsonl", {"prompt": "x"}))
    with pytest.raises(QuasarError, match=message):
        run_bench(other, prompts, BenchOptions(), Console(quiet=True))


def test_a_prompt_that_fits_one_engine_only_is_refused_before_they_are_opened(engine_dirs, tmp_path, no_cells):
    shorter = altered(
        engine_dirs["BF16"], tmp_path / "other", "config.json", lambda values: values["limits"].update(max_seq_len=8)
    )
    path = write_prompts(tmp_path / "p.jsonl", {"prompt": "1234567"}, {"task": "long", "prompt": "12345678"})
    with pytest.raises(QuasarError, match=r"prompt 2 \(task long\) has 8 tokens; allowed: 1 to 7"):
        run_bench(engine_dirs | {"BF16": shorter}, load_prompts(path), BenchOptions(raw=True), Console(quiet=True))


@pytest.fixture
def no_cells(monkeypatch):
    """A test that starts a cell's process fails."""

    def start(*_):
        raise AssertionError("a cell was started")

    monkeypatch.setattr("quasar_trt.bench.run.CellProcess", start)


def test_the_warning_about_the_reference_engine_appears_once(engine_dirs, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("quasar_trt.plugins.native.UNAVAILABLE", "it was not built")
    prompts = load_prompts(write_prompts(tmp_path / "p.jsonl", {"prompt": "abc"}))
    report = run_bench(engine_dirs, prompts, BenchOptions(repeats=1, max_tokens=2, threads=1), Console(quiet=True))
    assert len(report.runs) == 4
    assert capfd.readouterr().err.count("warning: using the slow reference engine: it was not built") == 1


@pytest.mark.parametrize(("max_seq_len", "rows"), [(2, [1]), (3, [1, 2]), (8, [1, 2, 3, 5]), (9, [1, 2, 3, 5, 8])])
def test_verify_costs_keep_the_rows_that_fit(max_seq_len, rows):
    engine = StubEngine(lambda prefix: one_hot_logits(0, 4), vocab=4, max_seq_len=max_seq_len)
    assert list(verify_costs(engine, repeats=2)) == rows
    assert engine.caches == {}


def test_verify_costs_fill_the_context_by_chunks():
    engine = StubEngine(lambda prefix: one_hot_logits(0, 4), vocab=4, max_rows=50)
    verify_costs(engine, context=128, repeats=1)
    assert [len(step.tokens[0]) for step in engine.passes if step.needs_logits == [False]] == [50, 50, 28]
    assert all(step.positions[0].start == 128 for step in engine.passes[3:])


def test_rows_that_were_not_measured_are_shown_as_such():
    costs = {cell: {1: 0.004, 2: 0.005} for cell in CELLS}
    text = text_of(dataclasses.replace(known_report(), verify_costs=costs))
    row = next(line.split() for line in text.splitlines() if "INT8 drafted" in line and "%" in line)
    assert row[-4:] == ["1.25x", "-", "-", "-"]


def test_an_error_in_a_cell_reaches_the_caller(engine_dirs):
    with (
        CellProcess(INT8_DRAFTED, engine_dirs["INT8"], {"drafter_options": {"num_tokens": 3}}) as process,
        pytest.raises(QuasarError, match="unknown suffix drafter option 'num_tokens'"),
    ):
        process.weight_bytes_per_step()


def test_a_cell_that_dies_is_reported(engine_dirs):
    with CellProcess(INT8_PLAIN, engine_dirs["INT8"], {"drafter": None}) as process:
        process.weight_bytes_per_step()
        process._process.kill()
        with pytest.raises(QuasarError, match="the process of cell INT8 plain ended with exit code -9"):
            process.measure([1, 2, 3], SamplingParams(max_tokens=4))
