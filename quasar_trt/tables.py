"""Tables that the command line prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text


def facts_table(title: str, facts: Mapping[str, object]) -> Table:
    """Two columns, label and value."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        show_header=False,
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in facts.items():
        table.add_row(label, Text(str(value)))  # Text: brackets in values are no markup
    return table


class Alarm(str):
    """A figure that should not be: red on the terminal, bold in Markdown."""


@dataclass(frozen=True)
class FigureTable:
    """A left-hand column of names, then columns of figures; all of it is text.

    headings: of every column; a line break in one is kept on the terminal only. note: what the figures mean.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def terminal(self) -> Group:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
        names, *figures = self.headings
        table.add_column(names, no_wrap=True, style="bold")
        for heading in figures:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(*(Text(cell, style="red" if isinstance(cell, Alarm) else "") for cell in row))
        note = [Text(self.note, style="dim")] if self.note else []
        return Group(Text(self.title, style="bold"), table, *note)

    def markdown(self) -> str:
        """Title, table and note, with a line feed at the end."""
        headings = [heading.replace("\n", " ") for heading in self.headings]
        rows = [[f"**{cell}**" if isinstance(cell, Alarm) else cell for cell in row] for row in self.rows]
        aligned = ["---", *["--:"] * (len(headings) - 1)]
        lines = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in (headings, aligned, *rows)]
        return "\n".join([f"### {self.title}", "", *lines, *(["", self.note] if self.note else [])]) + "\n"
