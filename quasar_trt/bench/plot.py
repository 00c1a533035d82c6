"""The picture of a benchmark of cells: a bar per task and cell."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from quasar_trt.bench.cell_figures import CellFigures

_WIDTH = 0.8  # of the bars of a task


def plot(report: CellFigures, cells: Sequence, path: Path) -> None:
    """Writes a PNG of these cells' speed-ups over the baseline: medians over the repeats, with lines from the lowest to the
    highest."""
    from matplotlib.figure import Figure  # without pyplot: no display, no state shared with the caller

    figure = Figure(figsize=(max(6, 1.3 * len(report.tasks) + 2), 4), layout="constrained")
    axes = figure.add_subplot(ylabel=f"speed-up over {report.baseline.name}")
    width = _WIDTH / len(cells)
    for position, cell in enumerate(cells):
        speedups = [report.speedups(cell, task) or [0.0] for task in report.tasks]
        medians = [statistics.median(values) for values in speedups]
        below = [middle - min(values) for middle, values in zip(medians, speedups, strict=True)]
        above = [max(values) - middle for middle, values in zip(medians, speedups, strict=True)]
        places = [task + (position - (len(cells) - 1) / 2) * width for task in range(len(report.tasks))]
        axes.bar(places, medians, width, yerr=[below, above], capsize=2, label=cell.name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(report.tasks)), report.tasks, rotation=20, ha="right")
    axes.legend()
    figure.savefig(path, format="png", dpi=150)
