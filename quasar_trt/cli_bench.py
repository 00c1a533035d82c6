"""The command line's benchmarks: quasar-trt bench [cells] | drafters | kernels | requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quasar_trt.bench.options import (
    BenchOptions,
    CellOptions,
    DrafterBenchOptions,
    KernelBenchOptions,
    RequestsBenchOptions,
)
from quasar_trt.cli_options import THREADS, DefaultGroup, drafter_options, field_option
from quasar_trt.cli_output import check_outputs, show_report
from quasar_trt.cli_types import PATH, Names, Numbers, Real, Whole

if TYPE_CHECKING:
    from quasar_trt.bench.prompts import Prompt


@click.group(cls=DefaultGroup)
def bench():
    """Measure speed.

    Without a command it is `cells`: quasar-trt bench --int8 DIR --bf16 DIR --prompts FILE
    """


def cell_options(command):
    """The options of a benchmark of cells."""
    for option in (
        THREADS,
        field_option(CellOptions, "raw", "Encode prompts as they are, without the chat template.", flag=True),
        field_option(CellOptions, "ignore_eos", "Go on past the end-of-sequence token.", flag=True),
        field_option(CellOptions, "seed", "Seed of every request.", type=Whole()),
        field_option(CellOptions, "temperature", "0 is greedy.", type=Real()),
        field_option(CellOptions, "max_tokens", "Most tokens to emit per prompt.", type=Whole()),
        field_option(CellOptions, "repeats", "Times that each cell decodes each prompt.", type=Whole()),
        field_option(CellOptions, "random_prompts", "Prompts of random ids, in which nothing repeats.", type=Whole()),
        click.option("--limit-per-task", type=Whole(least=1), help="Use only the first N prompts of each task."),
        click.option("--prompts", type=PATH, metavar="FILE", help="JSON Lines with prompt, turns or messages."),
    ):
        command = option(command)
    return command


OUTPUT = click.option("--output", type=PATH, metavar="FILE", help="Save every figure and time as JSON.")
MARKDOWN = click.option("--markdown", type=PATH, metavar="FILE", help="Save the tables as Markdown.")


@bench.command()
@click.option("--int8", type=PATH, required=True, metavar="DIR", help="Engine with INT8 weights.")
@click.option("--bf16", type=PATH, required=True, metavar="DIR", help="Engine of the same model with BF16 weights.")
@drafter_options()
@cell_options
@OUTPUT
@MARKDOWN
@click.option("--plot", type=PATH, metavar="FILE.png", help="Draw the speed-ups of each task.")
def cells(int8, bf16, prompts, limit_per_task, output, markdown, plot, drafter_option, **options):
    """Compare BF16 and INT8, plain and drafted.

    The four cells run interleaved, prompt by prompt, each in a process of its own.
    """
    check_outputs({"--output": output, "--markdown": markdown, "--plot": plot})
    options = BenchOptions(drafter_options=dict(drafter_option), **options)
    prompts = read_prompts(prompts, limit_per_task, options)

    from rich.console import Console

    from quasar_trt.bench.run import run_bench

    report = run_bench({"BF16": bf16, "INT8": int8}, prompts, options, Console(stderr=True))
    show_report(report, output, markdown)
    if plot:
        from quasar_trt.bench.cell import CELLS
        from quasar_trt.bench.plot import plot as draw

        draw(report, CELLS[1:], plot)


@bench.command()
@click.option("--engine", type=PATH, required=True, metavar="DIR", help="Engine that verifies.")
@field_option(DrafterBenchOptions, "drafters", "Drafters to compare.", type=Names(), metavar="NAME,NAME,...")
@cell_options
@OUTPUT
@MARKDOWN
@click.option("--plot", type=PATH, metavar="FILE.png", help="Draw the speed-ups of each task.")
def drafters(engine, prompts, limit_per_task, output, markdown, plot, **options):
    """Compare drafters on one engine.

    Plain decoding and every drafter run interleaved, prompt by prompt, each in a process of its own.
    """
    check_outputs({"--output": output, "--markdown": markdown, "--plot": plot})
    options = DrafterBenchOptions(**options)
    prompts = read_prompts(prompts, limit_per_task, options)

    from rich.console import Console

    from quasar_trt.bench.drafters import run_drafter_bench

    report = run_drafter_bench(engine, prompts, options, Console(stderr=True))
    show_report(report, output, markdown)
    if plot:
        from quasar_trt.bench.plot import plot as draw

        draw(report, report.contenders[1:], plot)


def read_prompts(path: Path | None, limit_per_task: int | None, options: CellOptions) -> list[Prompt]:
    """Those of a benchmark of cells, without the random ones. Raises click.UsageError where there are neither."""
    from quasar_trt.bench.prompts import load_prompts

    if not (path or options.random_prompts):
        raise click.UsageError("--prompts or --random-prompts is missing", click.get_current_context())
    return load_prompts(path, limit_per_task) if path else []


@bench.command()
@click.option("--engine", type=PATH, multiple=True, metavar="DIR", help="Time its passes too; may be repeated.")
@field_option(KernelBenchOptions, "rows", "Rows of a pass.", type=Numbers())
@field_option(KernelBenchOptions, "repeats", "Times that each number of rows is timed.", type=Whole())
@THREADS
@OUTPUT
@MARKDOWN
def kernels(engine, output, markdown, **options):
    """Compare linears and engine passes with the speed of memory.

    Weights read per second, beside the read bandwidth that the same threads reach in the same run.
    """
    check_outputs({"--output": output, "--markdown": markdown})
    options = KernelBenchOptions(**options)

    from rich.console import Console

    from quasar_trt.bench.kernels import run_kernel_bench

    show_report(run_kernel_bench(engine, options, Console(stderr=True)), output, markdown)


@bench.command()
@click.option("--engine", type=PATH, required=True, metavar="DIR", help="Engine to run the requests.")
@click.option("--prompts", type=PATH, required=True, metavar="FILE", help="JSON Lines with prompt, turns or messages.")
@click.option("--limit-per-task", type=Whole(least=1), help="Use only the first N prompts of each task.")
@field_option(RequestsBenchOptions, "concurrency", "Requests at once.", type=Numbers())
@drafter_options("none")
@field_option(RequestsBenchOptions, "repeats", "Times that all prompts are decoded with each.", type=Whole())
@field_option(RequestsBenchOptions, "max_tokens", "Most tokens to emit per prompt.", type=Whole())
@field_option(RequestsBenchOptions, "temperature", "0 is greedy.", type=Real())
@field_option(RequestsBenchOptions, "seed", "Seed of every request.", type=Whole())
@field_option(RequestsBenchOptions, "ignore_eos", "Go on past the end-of-sequence token.", flag=True)
@field_option(RequestsBenchOptions, "raw", "Encode prompts as they are, without the chat template.", flag=True)
@THREADS
@OUTPUT
@MARKDOWN
def requests(engine, prompts, limit_per_task, output, markdown, drafter, drafter_option, **options):
    """Compare many requests at once with one at a time.

    Tokens per second of all together, and what a long prompt does to the steps of others.
    """
    from quasar_trt.bench.prompts import load_prompts

    check_outputs({"--output": output, "--markdown": markdown})
    options = RequestsBenchOptions(
        drafter=None if drafter == "none" else drafter, drafter_options=dict(drafter_option), **options
    )
    prompts = load_prompts(prompts, limit_per_task)

    from rich.console import Console

    from quasar_trt.bench.requests import run_requests_bench

    show_report(run_requests_bench(engine, prompts, options, Console(stderr=True)), output, markdown)
