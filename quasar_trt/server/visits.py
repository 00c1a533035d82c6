"""How many are here."""

from __future__ import annotations

import asyncio


class Visits:
    """A context manager for each one that comes; `over` waits until all have left."""

    def __init__(self):
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def __enter__(self) -> None:
        self._count += 1
        self._none.clear()

    def __exit__(self, *exception) -> None:
        self._count -= 1
        if not self._count:
            self._none.set()

    async def over(self) -> None:
        await self._none.wait()
