"""Server-sent events."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

from starlette.responses import Response

DONE = b"data: [DONE]\n\n"


def event(value: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


class EventStream(Response):
    """Sends events as they come. The iterator is closed however that ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope, receive, send) -> None:
        async with contextlib.aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for body in events:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
