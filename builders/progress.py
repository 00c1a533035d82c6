"""Progress bars on stderr for a build's stages."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

Advance = Callable[[int], None]


class Stages:
    """A context manager that shows one bar per stage, or nothing when not `shown`. `say` prints either way."""

    def __init__(self, shown: bool):
        self.console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self.console,
            disable=not shown,
        )

    def __enter__(self) -> Stages:
        self._progress.start()
        return self

    def __exit__(self, kind, value, traceback) -> None:
        self._progress.stop()

    def stage(self, description: str, total: int) -> Advance:
        """A new bar; calling the result moves it on by that many units."""
        task = self._progress.add_task(description, total=total)
        return lambda count: self._progress.advance(task, count)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)
