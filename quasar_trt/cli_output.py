"""What commands leave behind: files that are known to be writable before a long run, and a benchmark's report."""

from __future__ import annotations

import json
import os
from pathlib import Path

from quasar_trt.errors import QuasarError
from quasar_trt.plots import check_plot


def check_outputs(paths: dict[str, Path | None]) -> None:
    """Option -> the file it names. Raises QuasarError, before a long run, for one that could not be written after it."""
    for option, path in paths.items():
        if path is None:
            continue
        if not path.parent.is_dir():
            raise QuasarError(f"{option}: directory {path.parent} does not exist")
        if path.is_dir():
            raise QuasarError(f"{option}: {path} is a directory; give the name of a file")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise QuasarError(f"{option}: no permission to write {path}")
    if plot := paths.get("--plot"):
        check_plot(plot)


def show_report(report, output: Path | None, markdown: Path | None) -> None:
    """Prints a benchmark's tables and its summary, and saves what is asked for.

    report: anything with tables() -> [FigureTable], summary() -> str and to_dict() -> what JSON can hold.
    """
    from rich.console import Console

    console, tables, summary = Console(), report.tables(), report.summary()
    for table in tables:
        console.print(table.terminal(), "")
    console.print(summary, style="dim", highlight=False)
    if output:
        save_json(output, report.to_dict())
    if markdown:
        _save("--markdown", markdown, "\n".join([*(table.markdown() for table in tables), f"{summary}\n"]))


def save_json(path: Path, values: dict) -> None:
    """Writes what --output asks for."""
    _save("--output", path, json.dumps(values, indent=1) + "\n")


def _save(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise QuasarError(f"{option}: cannot write {path}: {error.strerror}") from None
