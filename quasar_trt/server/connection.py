"""A connection, one of a bounded number, that does not wait forever for its client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from quasar_trt.server.errors import ApiError

MAX_CONNECTIONS = 900  # below the usual limit of 1024 open files
HEAD_SECONDS = 10.0  # for request line and headers
STALL_SECONDS = 30.0  # in which a client reads at least `_LEAST_READ` on, once the buffers are full
_LEAST_READ = 2**15  # bytes
_NO_HTTP = (
    "the request is malformed HTTP, or its head is too large; allowed: HTTP/1.1, and http:// rather than https://"
)


class _Alarm:
    """Does something after some seconds, unless it is cleared before."""

    def __init__(self):
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float, action: Callable[[], None]) -> None:
        """Where it is set already, it stays as it is."""
        self._timer = self._timer or asyncio.get_running_loop().call_later(seconds, action)

    def clear(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = None


async def _crowded(scope, receive, send) -> None:
    """The application of connections beyond the limit."""
    refusal = ApiError(503, f"{MAX_CONNECTIONS} connections are open already; close some, or come again later")
    await refusal.response()(scope, receive, send)


class Connection(H11Protocol):
    """uvicorn's, cut off when the head of a request does not come to its end, or when an answer is not read on.

    Its own refusals have the shape of the application's.
    """

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self.app = _crowded
        self._head, self._stall = _Alarm(), _Alarm()
        self._head.set(HEAD_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # A request that has begun, or what is left of one that was refused before its body had come.
        refused = self.cycle is not None and self.cycle.response_complete and self.cycle.more_body
        if self.conn.their_state is h11.IDLE or refused:
            self._head.set(HEAD_SECONDS, self.transport.abort)
        else:
            self._head.clear()

    def send_400_response(self, msg: str) -> None:
        """Called for what is no HTTP."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # behind the answer to what came before
            self.transport.abort()
            return
        response = ApiError(400, _NO_HTTP).response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        for part in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=response.body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(part))
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall.clear()

    def _await_reading(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._stall.set(STALL_SECONDS, partial(self._check_reading, size))

    def _check_reading(self, size: int) -> None:
        """Nothing is written meanwhile, so the buffer shrinks by what the client has read."""
        self._stall.clear()
        if size - self.transport.get_write_buffer_size() < _LEAST_READ:
            self.transport.abort()
        else:
            self._await_reading()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # closing would wait for a client that does not read
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head.clear()
        self._stall.clear()
        super().connection_lost(exc)
