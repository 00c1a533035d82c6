"""The server process: the socket, the event loop, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Mapping

import uvicorn

from quasar_trt.async_runner import AsyncRunner
from quasar_trt.errors import QuasarError
from quasar_trt.runner import Runner
from quasar_trt.server.app import make_app
from quasar_trt.server.backend import Backend
from quasar_trt.server.connection import Connection
from quasar_trt.server.errors import LOG
from quasar_trt.server.options import ServerOptions
from quasar_trt.server.text import Text

_IDLE_SECONDS = 60  # that a connection may wait between requests
_ABORT_SECONDS = 5  # that requests have to end when they are aborted


def bind(host: str, port: int) -> socket.socket:
    """A socket at that address, which does not listen yet. Raises QuasarError when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:
        raise QuasarError(f"cannot listen at --host {host} --port {port}: {error}; choose another") from None
    return bound


class Server(uvicorn.Server):
    """Ends in order: the first signal lets running requests end while new ones are turned away, the second aborts all.

    started: called with the server once requests are taken.
    url: where it is then.
    """

    url: str

    def __init__(self, config: uvicorn.Config, backend: Backend, started: Callable[[Server], None]):
        super().__init__(config)
        self._backend = backend
        self._tell_started = started
        self._loop = asyncio.get_running_loop()
        self._tasks = [asyncio.create_task(self._end_with_engine())]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = sockets[0].getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._tell_started(self)

    def handle_exit(self, sig: int, frame) -> None:
        """Called for SIGINT, SIGTERM and SIGUSR1."""
        self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        if not self._backend.draining:
            self._backend.draining = True
            LOG.info("stopping: running requests end, new ones are turned away; once more aborts them")
            self._tasks.append(asyncio.create_task(self._drain()))
        else:
            self._tasks.append(asyncio.create_task(self._abort()))

    async def _drain(self) -> None:
        await self._backend.visits.over()
        self.should_exit = True

    async def _abort(self) -> None:
        LOG.info("aborting all requests")
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._backend.runner.shutdown(drain=False), _ABORT_SECONDS)
        self.should_exit = self.force_exit = True

    async def _end_with_engine(self) -> None:
        await self._backend.runner.failed.wait()
        self.should_exit = self.force_exit = True


def serve(
    runner: Runner,
    tokenizer,
    options: ServerOptions,
    bound: socket.socket,
    sampling: Mapping[str, object],
    started: Callable[[Server], None],
) -> None:
    """Serves until a signal ends it.

    tokenizer: one that nobody else uses; None where there is none. sampling: the model's own sampling parameters.
    Raises QuasarError when the engine's thread has failed or does not end.
    """
    asyncio.run(_serve(runner, tokenizer, options, bound, sampling, started))


async def _serve(runner, tokenizer, options, bound, sampling, started) -> None:
    async_runner = AsyncRunner(runner, max_requests=options.max_requests)
    backend = Backend(
        async_runner, Text(tokenizer), options, sampling, runner.max_seq_len, runner.engine.config.vocab_size
    )
    config = uvicorn.Config(
        make_app(backend),
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_ABORT_SECONDS,  # requests are over then, but a client may not read its answer
    )
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # what clients send wrong is theirs to know
    server = Server(config, backend, started)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, server.handle_exit)  # mpirun passes it on, where it answers SIGTERM itself
    await server.serve(sockets=[bound])
    try:
        await asyncio.wait_for(async_runner.shutdown(drain=False), _ABORT_SECONDS)
    except asyncio.TimeoutError:
        raise QuasarError("the pass of the engine that runs does not end; the server ends without it") from None
    if async_runner.failure:
        raise async_runner.failure
    runner.reset_prefix_cache()
    LOG.info("stopped: %d bytes of keys and values left over", runner.load.kv_bytes)
