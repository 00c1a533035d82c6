"""The tables of the four-cell benchmark."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from quasar_trt.bench.cell import BASELINE, CELLS, VERIFY_ROWS
from quasar_trt.bench.figures import median, number, ratio_interval, same_ids, spread
from quasar_trt.tables import FigureTable

if TYPE_CHECKING:
    from quasar_trt.bench.report import Report

_DRAFTED = CELLS[-1]
_LENGTH = "mean\nacceptance\nlength"
_PARTS = ("draft", "verify", "accept")


def report_tables(report: Report) -> list[FigureTable]:
    by_task = [_speedups(report), _drafted(report)] if len(report.tasks) > 1 else []
    return [_cells(report), *by_task, _gains(report), _costs(report)]


def _cells(report: Report) -> FigureTable:
    rows = []
    for cell in CELLS:
        options = report.options
        ids = same_ids(*report.identical(cell), options.drafter, options.temperature) if cell.drafted else ""
        rows.append(
            (
                cell.name,
                number(report.speed(cell), ".1f"),
                "1.00x" if cell == BASELINE else spread(report.speedups(cell)),
                f"{report.mean_acceptance_length(cell):.2f}",
                f"{report.weight_bytes[cell] / 1e6:,.0f} MB",
                f"{report.peak_memory[cell] / 1e6:,.0f} MB",
                ids,
            )
        )
    headings = ("cell", "tokens/s", "speed-up", _LENGTH, "weights\nper step", "peak\nmemory", "ids as\nplain")
    return FigureTable("four cells", headings, rows)


def _speedups(report: Report) -> FigureTable:
    rows = [
        (
            task,
            number(report.speed(BASELINE, task), ".1f"),
            *(median(report.speedups(cell, task)) for cell in CELLS[1:]),
        )
        for task in report.tasks
    ]
    means = (report.mean_speedup_of_tasks(cell) for cell in CELLS[1:])
    rows.append(("mean of the tasks", "", *("-" if mean is None else f"{mean:.2f}x" for mean in means)))
    headings = ("task", "BF16\nplain\ntokens/s", *(cell.name.replace(" ", "\n") for cell in CELLS[1:]))
    return FigureTable("by task: speed-up over BF16 plain", headings, rows)


def _drafted(report: Report) -> FigureTable:
    rows = [
        (
            task,
            spread([speed for speed in report.speeds(_DRAFTED, task) if speed], ".1f", ""),
            f"{report.mean_acceptance_length(_DRAFTED, task):.2f}",
            *(f"{report.shares(_DRAFTED, task)[part]:.1%}" for part in _PARTS),
        )
        for task in report.tasks
    ]
    return FigureTable(f"by task: {_DRAFTED.name}", ("task", "tokens/s", _LENGTH, *_PARTS), rows)


def _gains(report: Report) -> FigureTable:
    rows = []
    for name, task in [*((task, task) for task in report.tasks if len(report.tasks) > 1), ("all prompts", None)]:
        gains = report.drafting_gains(_DRAFTED.weights, task)
        interval = ratio_interval(gains)
        rows.append(
            (
                name,
                str(len(gains)),
                f"{statistics.geometric_mean(gains):.2f}x" if gains else "-",
                f"{interval[0]:.3f}..{interval[1]:.3f}" if interval else "-",
                f"{min(gains):.2f}x" if gains else "-",
            )
        )
    headings = ("task", "prompts", "geometric\nmean", "95 % interval\nof the mean", "lowest\nprompt")
    return FigureTable(f"what drafting gains: {_DRAFTED.name} over {_DRAFTED.weights} plain", headings, rows)


def _costs(report: Report) -> FigureTable:
    rows = []
    several_ranks = report.communication_share(BASELINE) is not None
    for cell in CELLS:
        costs = report.relative_verify_costs(cell)
        shares = [f"{report.shares(cell)[part]:.1%}" for part in _PARTS]
        if several_ranks:
            shares.append(number(report.communication_share(cell), ".1%"))
        rows.append((cell.name, *shares, *(f"{costs[n]:.2f}x" if n in costs else "-" for n in VERIFY_ROWS[1:])))
    communication = ("ranks,\nof verify",) if several_ranks else ()
    headings = ("cell", *_PARTS, *communication, *(f"{rows}\nrows" for rows in VERIFY_ROWS[1:]))
    note = "shares of the time; cost of a verify step of that many rows over one of a single row"
    return FigureTable("where the time goes", headings, rows, note)
