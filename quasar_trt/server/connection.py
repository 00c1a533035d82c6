"""A connection that does not wait forever for its client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0  # for request line and headers
STALL_SECONDS = 30.0  # in which a client reads at least `_LEAST_READ` on, once the buffers are full
_LEAST_READ = 2**15  # bytes


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


class Connection(H11Protocol):
    """uvicorn's, cut off when the head of a request does not come to its end, or when an answer is not read on."""

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
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
