"""The benchmark of many requests at once: the arithmetic of its figures, what it refuses, and a run on a tiny engine."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from quasar_trt.bench.options import RequestsBenchOptions
from quasar_trt.bench.prompts import Prompt
from quasar_trt.bench.requests import run_requests_bench
from quasar_trt.bench.requests_report import Batch, LongPrompt, RequestsReport
from quasar_trt.errors import QuasarError
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

QUIET = Console(quiet=True)
PROMPTS = [Prompt("a", ({"role": "user", "content": text},)) for text in ("one", "two and two", "three", "four")]


def known_report(last_ids=(1, 2)) -> RequestsReport:
    """Two prompts of two tokens, two repeats: 4 tokens in 4 and 8 s one at a time, in 1 and 4 s four at a time."""
    batches = [
        Batch(number, ((1, 2), last_ids if number == 4 else (1, 2)), seconds, 2.0)
        for number, seconds in ((1, 4.0), (4, 1.0), (1, 8.0), (4, 4.0))
    ]
    long_prompt = LongPrompt(4096, 4, (0.01, 0.01, 0.03), (0.02, 0.04, 0.06))
    options = RequestsBenchOptions(concurrency=(4, 1, 4), repeats=2)
    return RequestsReport(options, Path("e"), 2, tuple(batches), (long_prompt,) * 2)


def test_tables_of_a_known_run():
    tables = {table.title: [list(row) for row in table.rows] for table in known_report().tables()}
    assert tables == {
        "throughput": [
            ["1", "0.8", "1.00x", "2.00", "4/4"],
            ["4", "2.5", "3.00x (2.00..4.00)", "2.00", "4/4"],
        ],
        "steps of 4 requests while a prompt enters": [
            ["4096", "4.00x (4.00..4.00)", "1.49x (1.49..1.49)", "60 ms (60..60)"]
        ],
    }
    console = Console(width=80, file=io.StringIO())
    for table in known_report().tables():
        console.print(table.terminal())
    assert max(map(len, console.file.getvalue().splitlines())) <= 80 and "…" not in console.file.getvalue()


def test_ids_that_differ_from_those_of_the_request_alone_stand_out():
    assert known_report((1, 3)).identical(4) == (2, 4)
    assert "**2/4**" in known_report((1, 3)).tables()[0].markdown()


def test_options_are_checked():
    with pytest.raises(QuasarError, match="concurrency is 2,4; allowed: 1, and larger numbers"):
        RequestsBenchOptions(concurrency=(4, 2))
    with pytest.raises(QuasarError, match="repeats is 0"):
        RequestsBenchOptions(repeats=0)


def test_too_few_prompts_and_too_many_requests_are_refused(engine_dirs):
    with pytest.raises(QuasarError, match="4 prompts for a concurrency of 5"):
        run_requests_bench(engine_dirs["INT8"], PROMPTS, RequestsBenchOptions(concurrency=(1, 5)), QUIET)
    with pytest.raises(QuasarError, match="concurrency is 17; allowed: at most 16"):
        run_requests_bench(engine_dirs["INT8"], PROMPTS, RequestsBenchOptions(concurrency=(1, 17)), QUIET)


def test_every_concurrency_gives_the_ids_of_the_requests_alone(engine_dirs):
    options = RequestsBenchOptions(concurrency=(1, 3), repeats=2, max_tokens=6, raw=True, threads=1)
    report = run_requests_bench(engine_dirs["INT8"], PROMPTS, options, QUIET)
    alone = Runner.from_dir(engine_dirs["INT8"]).generate(
        [prompt.text for prompt in PROMPTS], SamplingParams(temperature=0, max_tokens=6)
    )
    expected = tuple(tuple(output.outputs[0].token_ids) for output in alone)
    assert [(batch.concurrency, batch.token_ids) for batch in report.batches] == [(1, expected), (3, expected)] * 2
    values = json.loads(json.dumps(report.to_dict()))
    assert values["concurrency"]["3"]["identical_to_alone"] == [8, 8]
    assert all(each["disturbed"] and each["num_decoding"] == 4 for each in values["long_prompts"])
