"""Several things at once, of which none outlives the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TypeVar

T = TypeVar("T")


async def all_of(coroutines: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Their results. When one raises, or the caller is cancelled, the others are cancelled."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """(which stream, item), as they come. Raises what one of them raises; closes all of them in the end."""
    if len(streams) == 1:  # without a task and a queue in between
        async with contextlib.aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    items: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def forward(index: int, stream: AsyncIterator[T]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    items.put_nowait((index, item))
            items.put_nowait(None)
        except Exception as error:
            items.put_nowait(error)

    tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await items.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
