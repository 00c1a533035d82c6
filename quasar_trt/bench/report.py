"""The figures of the four-cell benchmark, as tables and as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from quasar_trt.bench.cell import BASELINE, CELLS, Cell
from quasar_trt.bench.cell_figures import CellFigures, Run, gain_figures
from quasar_trt.bench.options import BenchOptions
from quasar_trt.bench.report_tables import report_tables
from quasar_trt.machine import describe_machine
from quasar_trt.tables import FigureTable


@dataclass(frozen=True)
class Report(CellFigures):
    """All runs of one benchmark; the methods derive every figure from them. A figure that was not measured is None.

    verify_costs: per cell, rows of a verify pass -> seconds, for those rows that its engine holds.
    """

    options: BenchOptions
    engine_dirs: dict[str, Path]
    runs: tuple[Run, ...]
    weight_bytes: dict[Cell, int]
    peak_memory: dict[Cell, int]
    verify_costs: dict[Cell, dict[int, float]]

    baseline = BASELINE

    def drafting_gains(self, weights: str, task: str | None = None) -> list[float]:
        """`gains` of drafting, with the same weights."""
        return self.gains(Cell(weights, True), Cell(weights, False), task)

    def identical(self, cell: Cell) -> tuple[int, int]:
        """(runs whose ids equal those of the plain cell with the same weights, all runs)."""
        return self.identical_to(Cell(cell.weights, False), cell)

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
                cell.name: self.figures(cell)
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
            "tasks": {task: {cell.name: self.figures(cell, task) for cell in CELLS} for task in self.tasks},
            "drafting_gain": {
                weights: {"all": self._gain(weights), "tasks": {task: self._gain(weights, task) for task in self.tasks}}
                for weights in self.engine_dirs
            },
            "runs": [run.to_dict() for run in self.runs],
        }

    def _gain(self, weights: str, task: str | None = None) -> dict:
        return gain_figures(self.drafting_gains(weights, task))

    def tables(self) -> list[FigureTable]:
        return report_tables(self)

    def summary(self) -> str:
        return (
            f"{self.conditions()}, drafter {self.options.drafter}. "
            "tokens/s excludes prefill; speed-up is the median over the repeats (min..max) of the ratio to BF16 plain."
        )
