"""The figures of the four-cell benchmark, as tables and as JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quasar_trt.bench.cell import BASELINE, CELLS, Cell, Measurement
from quasar_trt.bench.figures import count, ratio_interval
from quasar_trt.bench.options import BenchOptions
from quasar_trt.bench.report_tables import report_tables
from quasar_trt.machine import describe_machine
from quasar_trt.tables import FigureTable


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

    def speeds(self, cell: Cell, task: str | None = None) -> list[float | None]:
        """tokens/s, one per repeat; None where no token was timed."""
        runs = self.select(cell, task)
        return [_speed([run for run in runs if run.repeat == repeat]) for repeat in range(self.options.repeats)]

    def speedups(self, cell: Cell, task: str | None = None) -> list[float]:
        """Speed-up over BF16 plain, one per repeat."""
        pairs = zip(self.speeds(cell, task), self.speeds(BASELINE, task), strict=True)
        return [own / base for own, base in pairs if own and base]

    def mean_speedup_of_tasks(self, cell: Cell) -> float | None:
        """The mean over the tasks of each one's median speed-up; None where a task has none."""
        by_task = [self.speedups(cell, task) for task in self.tasks]
        return statistics.fmean(map(statistics.median, by_task)) if all(by_task) else None

    def drafting_gains(self, weights: str, task: str | None = None) -> list[float]:
        """tokens/s drafted over plain with the same weights, one ratio per prompt: the geometric mean over its repeats, each
        of which is paired. Prompts of which no token was timed are left out."""
        plain = {(run.prompt, run.repeat): _speed([run]) for run in self.select(Cell(weights, False), task)}
        by_prompt: dict[int, list[float]] = {}
        for run in self.select(Cell(weights, True), task):
            own, base = _speed([run]), plain[run.prompt, run.repeat]
            if own and base:
                by_prompt.setdefault(run.prompt, []).append(own / base)
        return [statistics.geometric_mean(ratios) for ratios in by_prompt.values()]

    def mean_acceptance_length(self, cell: Cell, task: str | None = None) -> float:
        """Emitted tokens / verify steps."""
        runs = [run.measurement for run in self.select(cell, task)]
        return sum(len(run.token_ids) for run in runs) / sum(run.num_verify_steps for run in runs)

    def identical(self, cell: Cell) -> tuple[int, int]:
        """(runs whose ids equal those of the plain cell with the same weights, all runs)."""
        plain = {(run.prompt, run.repeat): run.measurement.token_ids for run in self.select(Cell(cell.weights, False))}
        equal = [run.measurement.token_ids == plain[run.prompt, run.repeat] for run in self.select(cell)]
        return sum(equal), len(equal)

    def shares(self, cell: Cell, task: str | None = None) -> dict[str, float]:
        """Parts of the measured time spent in draft, verify and accept."""
        totals = {"draft": 0.0, "verify": 0.0, "accept": 0.0}
        for run in self.select(cell, task):
            for part, seconds in run.measurement.seconds.items():
                totals[part] += seconds
        whole = sum(totals.values())
        return {part: seconds / whole for part, seconds in totals.items()}

    def communication_share(self, cell: Cell) -> float | None:
        """Part of the time in verify that rank 0 spent in collectives; None for a single rank."""
        measurements = [run.measurement for run in self.select(cell)]
        communicated = sum(each.communication_seconds for each in measurements)
        return communicated / sum(each.seconds["verify"] for each in measurements) if communicated else None

    def relative_verify_costs(self, cell: Cell) -> dict[int, float]:
        """Rows of a verify pass -> its time over that of one row."""
        costs = self.verify_costs[cell]
        return {rows: seconds / costs[1] for rows, seconds in costs.items()}

    def to_dict(self) -> dict:
        """Everything as JSON: environment, options, figures per cell and task, and every single run."""
        return {
            "definition": "tokens/s = decode tokens / decode seconds, prefill excluded; speed-up = median over the repeats of the ratio to BF16 plain; drafting gain = tokens/s drafted over plain per prompt, with the 95 % bootstrap interval of its geometric mean over the prompts",
            "environment": describe_machine(),
            "options": dataclasses.asdict(self.options),
            "engines": {weights: str(directory) for weights, directory in self.engine_dirs.items()},
            "cells": {
                cell.name: self._figures(cell)
                | {
                    "weight_bytes_per_step": self.weight_bytes[cell],
                    "peak_memory_bytes": self.peak_memory[cell],
                    "identical_to_plain": self.identical(cell),
                    "mean_speedup_of_tasks": self.mean_speedup_of_tasks(cell),
                    "communication_share_of_verify": self.communication_share(cell),
                    "verify_cost_over_one_row": self.relative_verify_costs(cell),
                }
                for cell in CELLS
            },
            "tasks": {task: {cell.name: self._figures(cell, task) for cell in CELLS} for task in self.tasks},
            "drafting_gain": {
                weights: {"all": self._gain(weights), "tasks": {task: self._gain(weights, task) for task in self.tasks}}
                for weights in self.engine_dirs
            },
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
            "tokens_per_second_by_repeat": self.speeds(cell, task),
            "speedup": statistics.median(ratios) if ratios else None,
            "speedups": ratios,
            "mean_acceptance_length": self.mean_acceptance_length(cell, task),
            "time_shares": self.shares(cell, task),
        }

    def _gain(self, weights: str, task: str | None = None) -> dict:
        gains = self.drafting_gains(weights, task)
        return {
            "prompts": gains,
            "geometric_mean": statistics.geometric_mean(gains) if gains else None,
            "interval_95": ratio_interval(gains),
        }

    def tables(self) -> list[FigureTable]:
        return report_tables(self)

    def summary(self) -> str:
        options, prompts = self.options, len({run.prompt for run in self.runs})
        return (
            f"{count(prompts, 'prompt')}, {count(options.repeats, 'repeat')}, up to {options.max_tokens} tokens, temperature "
            f"{options.temperature:g}, end of sequence {'ignored' if options.ignore_eos else 'respected'}, drafter {options.drafter}. "
            "tokens/s excludes prefill; speed-up is the median over the repeats (min..max) of the ratio to BF16 plain."
        )


def _speed(runs: Sequence[Run]) -> float | None:
    seconds = sum(run.measurement.decode_seconds for run in runs)
    return sum(run.measurement.decode_tokens for run in runs) / seconds if seconds > 0 else None
