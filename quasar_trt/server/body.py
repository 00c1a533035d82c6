"""The body of a request as it comes in: bounded in bytes and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from quasar_trt.server.errors import ApiError

Message = dict[str, object]  # of ASGI

BODY_SECONDS = 30.0
_READ_ON = 16  # a body up to so many times too large is read to its end, so that its sender gets to see the refusal


class Body:
    """Stands between the application and the server's `receive`.

    max_bytes: more raises ApiError 413; a body that takes too long raises 408.
    """

    def __init__(self, receive: Callable[[], Awaitable[Message]], max_bytes: int):
        self._receive = receive
        self._max_bytes = max_bytes
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        self._num_bytes = 0
        self._complete = asyncio.Event()
        self._gone = asyncio.Event()

    async def receive(self) -> Message:
        """The next part; after the last, the news that the client has gone."""
        if self._complete.is_set():
            await self._gone.wait()
            return {"type": "http.disconnect"}
        while True:
            message = await self._next()
            self._num_bytes += len(message.get("body", b""))
            ends = not message.get("more_body")
            if self._num_bytes <= self._max_bytes:
                if ends:
                    self._complete.set()
                return message
            if ends or self._num_bytes > _READ_ON * self._max_bytes:
                raise ApiError(
                    413, f"the body has more than {self._max_bytes} bytes; send less, or raise --max-body-bytes"
                )

    async def gone(self) -> None:
        """Returns when the client goes away after it has sent the body."""
        await self._complete.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone.set()

    async def _next(self) -> Message:
        left = self._deadline - asyncio.get_running_loop().time()
        try:
            return await asyncio.wait_for(self._receive(), max(left, 0.0))
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_SECONDS:.0f} s; send it again") from None
