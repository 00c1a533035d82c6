"""The figures of a benchmark, as a table for the terminal and as JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from quasar_trt.bench.cell import BASELINE, CELLS, VERIFY_ROWS, Cell, Measurement
from quasar_trt.bench.options import BenchOptions
from quasar_trt.machine import describe_machine


@dataclass(frozen=True)
class Run:
    """One measurement and where it belongs; `prompt` is the prompt's index."""

    cell: Cell
    task: str
    prompt: int
    repeat: int
    num_prompt_tokens: int
    measurement: Measurement


@dataclass(frozen=True)
class Report:
    """All runs of one benchmark; the methods derive every figure from them. A figure that was not measured is None.

    verify_costs: per cell, rows of a verify pass -> seconds, for those rows that its engine holds.
    """

    options: BenchOptions
    engine_dirs: dict[str, Path]
    runs: tuple[Run, ...]
    weight_bytes: dict[Cell, int]
    peak_memory: dict[Cell, int]
    verify_costs: dict[Cell, dict[int, float]]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(run.task for run in self.runs))

    def select(self, cell: Cell, task: str | None = None) -> list[Run]:
        return [run for run in self.runs if run.cell == cell and task in (None, run.task)]

    def speed(self, cell: Cell, task: str | None = None) -> float | None:
        """tokens/s over all repeats."""
        return _speed(self.select(cell, task))

    def speedups(self, cell: Cell, task: str | None = None) -> list[float]:
        """Speed-up over BF16 plain, one per repeat."""
        ratios = []
        for repeat in range(self.options.repeats):
            own = _speed([run for run in self.select(cell, task) if run.repeat == repeat])
            base = _speed([run for run in self.select(BASELINE, task) if run.repeat == repeat])
            if own and base:
                ratios.append(own / base)
        return ratios

    def mean_acceptance_length(self, cell: Cell, task: str | None = None) -> float:
        """Emitted tokens / verify steps."""
        runs = [run.measurement for run in self.select(cell, task)]
        return sum(len(run.token_ids) for run in runs) / sum(run.num_verify_steps for run in runs)

    def identical(self, cell: Cell) -> tuple[int, int]:
        """(runs whose ids equal those of the plain cell with the same weights, all runs)."""
        plain = {(run.prompt, run.repeat): run.measurement.token_ids for run in self.select(Cell(cell.weights, False))}
        equal = [run.measurement.token_ids == plain[run.prompt, run.repeat] for run in self.select(cell)]
        return sum(equal), len(equal)

    def shares(self, cell: Cell) -> dict[str, float]:
        """Parts of the measured time spent in draft, verify and accept."""
        totals = {"draft": 0.0, "verify": 0.0, "accept": 0.0}
        for run in self.select(cell):
            for part, seconds in run.measurement.seconds.items():
                totals[part] += seconds
        whole = sum(totals.values())
        return {part: seconds / whole for part, seconds in totals.items()}

    def relative_verify_costs(self, cell: Cell) -> dict[int, float]:
        """Rows of a verify pass -> its time over that of one row."""
        costs = self.verify_costs[cell]
        return {rows: seconds / costs[1] for rows, seconds in costs.items()}

    def to_dict(self) -> dict:
        """Everything as JSON: environment, options, figures per cell and task, and every single run."""
        return {
            "definition": "tokens/s = decode tokens / decode seconds, prefill excluded; speed-up = median over the repeats of the ratio to BF16 plain",
            "environment": describe_machine(),
            "options": dataclasses.asdict(self.options),
            "engines": {weights: str(directory) for weights, directory in self.engine_dirs.items()},
            "cells": {
                cell.name: self._figures(cell)
                | {
                    "weight_bytes_per_step": self.weight_bytes[cell],
                    "peak_memory_bytes": self.peak_memory[cell],
                    "identical_to_plain": self.identical(cell),
                    "time_shares": self.shares(cell),
                    "verify_cost_over_one_row": self.relative_verify_costs(cell),
                }
                for cell in CELLS
            },
            "tasks": {task: {cell.name: self._figures(cell, task) for cell in CELLS} for task in self.tasks},
            "runs": [
                {
                    "cell": run.cell.name,
                    "task": run.task,
                    "prompt": run.prompt,
                    "repeat": run.repeat,
                    "num_prompt_tokens": run.num_prompt_tokens,
                }
                | dataclasses.asdict(run.measurement)
                for run in self.runs
            ],
        }

    def _figures(self, cell: Cell, task: str | None = None) -> dict:
        ratios = self.speedups(cell, task)
        return {
            "tokens_per_second": self.speed(cell, task),
            "speedup": statistics.median(ratios) if ratios else None,
            "speedups": ratios,
            "mean_acceptance_length": self.mean_acceptance_length(cell, task),
        }

    def show(self, console: Console) -> None:
        console.print(self._cell_table(), "")
        if len(self.tasks) > 1:
            console.print(self._task_table(), "")
        console.print(self._cost_table(), "")
        options, prompts = self.options, len({run.prompt for run in self.runs})
        console.print(
            f"{_count(prompts, 'prompt')}, {_count(options.repeats, 'repeat')}, up to {options.max_tokens} tokens, temperature {options.temperature:g}, "
            f"drafter {options.drafter}. tokens/s excludes prefill; speed-up is the median over the repeats (min..max) "
            "of the ratio to BF16 plain.",
            style="dim",
            highlight=False,
        )

    def _cell_table(self) -> Table:
        headings = (
            "tokens/s",
            "speed-up",
            "mean\nacceptance\nlength",
            "weights\nper step",
            "peak\nmemory",
            "ids as\nplain",
        )
        table = _table("four cells", "cell", *headings)
        for cell in CELLS:
            equal, total = self.identical(cell)
            table.add_row(
                cell.name,
                _number(self.speed(cell), ".1f"),
                "1.00x" if cell == BASELINE else _spread(self.speedups(cell)),
                f"{self.mean_acceptance_length(cell):.2f}",
                f"{self.weight_bytes[cell] / 1e6:,.0f} MB",
                f"{self.peak_memory[cell] / 1e6:,.0f} MB",
                ("" if equal == total else "[red]") + f"{equal}/{total}" if cell.drafted else "",
            )
        return table

    def _task_table(self) -> Table:
        headings = [cell.name.replace(" ", "\n") for cell in CELLS[1:]]
        length = "INT8 mean\nacceptance\nlength"
        table = _table("by task: speed-up over BF16 plain", "task", "BF16\nplain\ntokens/s", *headings, length)
        for task in self.tasks:
            table.add_row(
                task,
                _number(self.speed(BASELINE, task), ".1f"),
                *(_median(self.speedups(cell, task)) for cell in CELLS[1:]),
                f"{self.mean_acceptance_length(CELLS[-1], task):.2f}",
            )
        return table

    def _cost_table(self) -> Table:
        headings = (f"{rows}\nrows" for rows in VERIFY_ROWS[1:])
        table = _table("where the time goes", "cell", "draft", "verify", "accept", *headings)
        for cell in CELLS:
            costs = self.relative_verify_costs(cell)
            table.add_row(
                cell.name,
                *(f"{share:.1%}" for share in self.shares(cell).values()),
                *(f"{costs[rows]:.2f}x" if rows in costs else "-" for rows in VERIFY_ROWS[1:]),
            )
        table.caption = "shares of the time; cost of a verify step of that many rows over one of a single row"
        return table


def _table(title: str, first: str, *headings: str) -> Table:
    """A left-hand column of names, then columns of figures."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False
    )
    table.show_edge = False
    table.add_column(first, no_wrap=True, style="bold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _speed(runs: Sequence[Run]) -> float | None:
    seconds = sum(run.measurement.decode_seconds for run in runs)
    return sum(run.measurement.decode_tokens for run in runs) / seconds if seconds > 0 else None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _median(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f}x" if ratios else "-"


def _spread(ratios: Sequence[float]) -> str:
    """Median, with (min..max) when there is more than one."""
    return _median(ratios) if len(ratios) < 2 else f"{_median(ratios)} ({min(ratios):.2f}..{max(ratios):.2f})"
