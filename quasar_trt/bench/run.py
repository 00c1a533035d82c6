"""Runs the four cells interleaved: repeat by repeat, prompt by prompt, the cells in turn."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from quasar_trt.bench.cell import CELLS, CellHere, CellProcess
from quasar_trt.bench.cell_figures import Run
from quasar_trt.bench.options import BenchOptions, CellOptions
from quasar_trt.bench.progress import progress_bar
from quasar_trt.bench.prompts import EncodedPrompt, Prompt, encode_prompts, random_prompts
from quasar_trt.bench.report import Report
from quasar_trt.checkpoint import Checkpoint
from quasar_trt.engines import engine_of
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Manifest
from quasar_trt.ranks import lead
from quasar_trt.tokenizer import load_tokenizer


def run_bench(
    engine_dirs: dict[str, Path], prompts: list[Prompt], options: BenchOptions, progress_console: Console
) -> Report:
    """`engine_dirs`: {"BF16": ..., "INT8": ...}. `prompts` and `options.random_prompts` together are at least one. The
    progress bar goes to `progress_console`.

    Raises QuasarError when a directory holds other weights than its cell, the directories are not of one model or one target,
    a prompt does not fit, or a cell's process fails.
    """
    max_seq_len, vocab_size, engine = _check_engines(engine_dirs)
    encoded = encode_prompts(prompts, _tokenizer(engine_dirs), options.raw, max_seq_len)
    encoded += random_prompts(options.random_prompts, options.seed, vocab_size, max_seq_len)
    openings = {}
    for cell in CELLS:
        drafter = options.drafter if cell.drafted else None
        openings[cell] = (
            engine_dirs[cell.weights],
            {
                "drafter": drafter,
                "drafter_options": options.drafter_options if drafter else {},
                "engine": engine,
                "threads": options.threads,
            },
        )
    runs, weight_bytes, costs, peak_memory = run_cells(openings, encoded, options, progress_console)
    return Report(options, engine_dirs, runs, weight_bytes, peak_memory, costs)


def run_cells(
    openings: dict, encoded: list[EncodedPrompt], options: CellOptions, progress_console: Console
) -> tuple[tuple[Run, ...], dict, dict, dict]:
    """Runs every prompt by every cell, and every repeat.

    openings: cell -> (engine directory, options of its runner). Returns the runs, and per cell the weight bytes per step, what
    `verify_costs` says and the peak memory in bytes. Raises QuasarError when a cell's process fails.
    """
    make_cell = CellProcess if lead() is None else CellHere
    with ExitStack() as stack:
        cells, weight_bytes = {}, {}
        for cell, opening in openings.items():
            cells[cell] = stack.enter_context(make_cell(cell, *opening))
            # One opens after the other: whatever a runner times when it opens is not disturbed by another cell.
            weight_bytes[cell] = cells[cell].weight_bytes_per_step()
        progress = stack.enter_context(progress_bar(progress_console))
        bar = progress.add_task("warm-up", total=len(cells) * (1 + options.repeats * len(encoded)))
        for process in cells.values():
            process.measure(encoded[0].ids, options.sampling_params)
            progress.advance(bar)
        runs = []
        for repeat in range(options.repeats):
            for index, prompt in enumerate(encoded):
                progress.update(bar, description=f"repeat {repeat + 1}/{options.repeats}, {prompt.task}")
                for cell, process in cells.items():
                    measurement = process.measure(prompt.ids, options.sampling_params)
                    runs.append(Run(cell, prompt.task, index, repeat, len(prompt.ids), measurement))
                    progress.advance(bar)
        progress.update(bar, description="cost of verify rows")
        ends = {cell: process.finish() for cell, process in cells.items()}
    costs = {cell: cost for cell, (cost, _) in ends.items()}
    return tuple(runs), weight_bytes, costs, {cell: peak for cell, (_, peak) in ends.items()}


def _check_engines(engine_dirs: dict[str, Path]) -> tuple[int, int, str]:
    """(tokens that a sequence may have in both engines, size of their vocabulary, the engine that runs them). Raises QuasarError
    unless they fit their names and each other."""
    manifests = {weights: Manifest.open(directory) for weights, directory in engine_dirs.items()}
    for weights, manifest in manifests.items():
        found = _weights(manifest)
        if found != weights:
            raise QuasarError(f"{engine_dirs[weights]} holds {found} weights; --{weights.lower()} needs {weights}")
    one, other = engine_dirs.values()
    config = Checkpoint.open(one / "checkpoint").config
    if config != Checkpoint.open(other / "checkpoint").config:
        raise QuasarError(f"{one} and {other} are engines of different models; build both from one model")
    targets = {manifest.target for manifest in manifests.values()}
    if len(targets) > 1:
        raise QuasarError(f"{one} and {other} are for targets {', '.join(sorted(targets))}; build both for one target")
    # Chosen here, so that a warning about it appears once and not once per cell.
    engine = engine_of(next(iter(manifests.values())))
    return min(manifest.limits.max_seq_len for manifest in manifests.values()), config.vocab_size, engine


def _weights(manifest: Manifest) -> str:
    return "INT8" if manifest.recipe.quantized else "BF16"


def _tokenizer(engine_dirs: dict[str, Path]):
    """The tokenizer of both engines. Raises QuasarError when they have different ones."""
    one, other = map(load_tokenizer, engine_dirs.values())
    if one.get_vocab() != other.get_vocab():
        raise QuasarError(
            f"{' and '.join(map(str, engine_dirs.values()))} have different tokenizers; build both from one model"
        )
    return one
