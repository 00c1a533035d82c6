"""Tables that the command line prints."""

from __future__ import annotations

from collections.abc import Mapping

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
