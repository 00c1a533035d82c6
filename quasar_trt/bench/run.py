"""Runs the four cells interleaved: repeat by repeat, prompt by prompt, the cells in turn."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from quasar_trt.bench.cell import CELLS, CellProcess
from quasar_trt.bench.options import BenchOptions
from quasar_trt.bench.prompts import Prompt
from quasar_trt.bench.report import Report, Run
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Manifest
from quasar_trt.tokenizer import encode, encode_chat, load_tokenizer


def run_bench(
    engine_dirs: dict[str, Path], prompts: list[Prompt], options: BenchOptions, progress_console: Console
) -> Report:
    """`engine_dirs`: {"BF16": ..., "INT8": ...}. The progress bar goes to `progress_console`.

    Raises QuasarError when a directory holds other weights than its cell or a cell's process fails.
    """
    sampling_params = options.sampling_params
    for weights, directory in engine_dirs.items():
        found = "INT8" if Manifest.open(directory).recipe.quantized else "BF16"
        if found != weights:
            raise QuasarError(f"{directory} holds {found} weights; --{weights.lower()} needs {weights}")
    tokenizer = load_tokenizer(engine_dirs["INT8"])
    ids = [
        encode(tokenizer, prompt.text) if options.raw else encode_chat(tokenizer, prompt.messages) for prompt in prompts
    ]

    with ExitStack() as stack:
        cells = {
            cell: stack.enter_context(
                CellProcess(
                    cell,
                    engine_dirs[cell.weights],
                    {
                        "drafter": options.drafter if cell.drafted else None,
                        "drafter_options": options.drafter_options if cell.drafted else {},
                        "threads": options.threads,
                    },
                )
            )
            for cell in CELLS
        }
        weight_bytes = {cell: process.weight_bytes_per_step() for cell, process in cells.items()}
        progress = stack.enter_context(
            Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=progress_console,
                transient=True,
            )
        )
        bar = progress.add_task("warm-up", total=len(CELLS) * (1 + options.repeats * len(prompts)))
        for process in cells.values():
            process.measure(ids[0], sampling_params)
            progress.advance(bar)
        runs = []
        for repeat in range(options.repeats):
            for index, prompt in enumerate(prompts):
                progress.update(bar, description=f"repeat {repeat + 1}/{options.repeats}, {prompt.task}")
                for cell, process in cells.items():
                    measurement = process.measure(ids[index], sampling_params)
                    runs.append(Run(cell, prompt.task, index, repeat, len(ids[index]), measurement))
                    progress.advance(bar)
        progress.update(bar, description="cost of verify rows")
        ends = {cell: process.finish() for cell, process in cells.items()}
    costs = {cell: cost for cell, (cost, _) in ends.items()}
    peak_memory = {cell: peak for cell, (_, peak) in ends.items()}
    return Report(options, engine_dirs, tuple(runs), weight_bytes, peak_memory, costs)
