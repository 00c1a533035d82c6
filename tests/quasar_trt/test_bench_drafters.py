"""The benchmark of drafters: figures from known runs, a run on tiny engines, and what is refused before it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from quasar_trt.bench.cell import Measurement
from quasar_trt.bench.cell_figures import Run
from quasar_trt.bench.drafter_report import Contender, DrafterReport
from quasar_trt.bench.drafters import run_drafter_bench
from quasar_trt.bench.options import DrafterBenchOptions
from quasar_trt.bench.prompts import load_prompts
from quasar_trt.cli import cli
from quasar_trt.errors import QuasarError

PLAIN, SUFFIX, ENGINE = CONTENDERS = tuple(map(Contender, (None, "suffix", "engine:/engines/int8")))


def measurement(seconds: float, **values) -> Measurement:
    return Measurement(
        token_ids=(1, 2, 3, 4),
        decode_tokens=3,
        decode_seconds=seconds,
        num_verify_steps=4,
        seconds={"draft": 1.0, "verify": 8.0, "accept": 1.0},
        **values,
    )


def known_report(suffix_ids=(1, 2, 3, 4)) -> DrafterReport:
    """Two tasks of one prompt, two repeats."""
    drafted = {"num_drafts": 4, "num_draft_tokens": 10, "num_accepted_tokens_per_pos": (3, 1)}
    made = {
        PLAIN: measurement(4.0),
        SUFFIX: measurement(2.0, **drafted),
        ENGINE: measurement(1.0, num_drafts=2, num_draft_tokens=8, num_accepted_tokens_per_pos=(2, 2, 1)),
    }
    runs = [
        Run(contender, task, index, repeat, 7, made[contender])
        for repeat in range(2)
        for index, task in enumerate(("chat", "code"))
        for contender in CONTENDERS
    ]
    peak = dict.fromkeys(CONTENDERS, 400_000_000)
    return DrafterReport(DrafterBenchOptions(repeats=2), Path("bf16"), CONTENDERS, tuple(runs), peak)


def test_drafts_and_acceptance_by_position():
    report = known_report()
    assert report.drafting(SUFFIX) == {
        "drafts_per_step": 1.0,
        "tokens_per_draft": 2.5,
        "acceptance_rate": 0.4,
        "acceptance_by_position": [0.75, 0.25],
    }
    assert report.drafting(ENGINE)["acceptance_by_position"] == [1.0, 1.0, 0.5]
    assert report.drafting(PLAIN) == {
        "drafts_per_step": 0.0,
        "tokens_per_draft": None,
        "acceptance_rate": None,
        "acceptance_by_position": [],
    }


def test_tables_show_the_figures_within_80_columns():
    report = known_report()
    console = Console(width=80, file=io.StringIO())
    for table in report.tables():
        console.print(table.terminal(), "")
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in console.file.getvalue()
    rows = [line.split() for line in lines if line.startswith("engine:int8")]
    assert rows[0] == ["engine:int8", "3.0", "4.00x", "(4.00..4.00)", "4.00x", "4.00x", "400", "MB", "4/4"]
    assert rows[1] == ["engine:int8", "1.00", "0.50", "4.0", "62.5%", "10.0%", "80.0%", "10.0%"]
    assert rows[2] == ["engine:int8", "100%", "100%", "50%", "-", "-", "-", "-", "-"]
    by_task = [line.split() for line in lines if line.startswith("code")]
    assert by_task == [["code", "0.8", "2.00x", "4.00x"]]
    assert report.to_dict()["drafters"]["suffix"]["gain"]["geometric_mean"] == pytest.approx(2.0)


def test_drafters_on_a_tiny_engine(engine_dirs, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"task": task, "prompt": "abcabcabc"}) + "\n" for task in "ab"))
    options = DrafterBenchOptions(
        drafters=("suffix", f"engine:{engine_dirs['INT8']}"), repeats=1, max_tokens=12, ignore_eos=True, threads=1
    )
    report = run_drafter_bench(engine_dirs["BF16"], load_prompts(path), options, Console(quiet=True))
    assert [run.cell.name for run in report.runs[:3]] == ["plain", "suffix", "engine:int8"]
    for contender in report.contenders:
        assert report.identical_to(report.baseline, contender) == (2, 2)
        assert all(len(run.measurement.token_ids) == 12 for run in report.select(contender))
        assert report.speed(contender) > 0 and report.peak_memory[contender] > 1_000_000
    assert not any(run.measurement.num_drafts for run in report.select(report.baseline))
    values = json.loads(json.dumps(report.to_dict()))
    assert set(values["drafters"]) == {"plain", *options.drafters} and len(values["runs"]) == 6


def test_command_saves_json_markdown_and_a_picture(engine_dirs, tmp_path):
    prompts, output = tmp_path / "p.jsonl", tmp_path / "bench.json"
    prompts.write_text(json.dumps({"task": "chat", "prompt": "abcabc"}) + "\n")
    markdown, plot = tmp_path / "bench.md", tmp_path / "bench.png"
    options = ["--prompts", prompts, "--drafters", "ngram,suffix", "--max_tokens", 6, "--repeats", 1, "--threads", 1]
    files = ["--output", output, "--markdown", markdown, "--plot", plot]
    command = ["bench", "drafters", "--engine", engine_dirs["INT8"], *options, *files]
    result = CliRunner().invoke(cli, list(map(str, command)), catch_exceptions=False)
    assert result.exit_code == 0
    assert json.loads(output.read_text())["options"]["drafters"] == ["ngram", "suffix"]
    assert markdown.read_text().startswith("### drafters\n\n| drafter |")
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("drafters", "message"),
    [
        (("suffix", "sufix"), "unknown drafter 'sufix'.*did you mean 'suffix'"),
        (("engine",), "drafter is 'engine'; allowed: engine:DIR"),
        (("engine:nowhere",), "engine directory nowhere does not exist"),
        (("none",), "unknown drafter 'none'"),
        (("suffix", "suffix"), "drafters are 'suffix,suffix'; allowed: at least one, and each once"),
        ((), "drafters are ''; allowed"),
    ],
)
def test_unusable_drafters_are_refused_before_anything_runs(engine_dirs, drafters, message, monkeypatch):
    monkeypatch.setattr("quasar_trt.bench.drafters.run_cells", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(QuasarError, match=message):
        run_drafter_bench(engine_dirs["BF16"], [], DrafterBenchOptions(drafters=drafters), Console(quiet=True))
