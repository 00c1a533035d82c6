"""Who may come in, and what ends with a client that goes away: a layer around the application."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

from quasar_trt.server.backend import Backend
from quasar_trt.server.body import Body
from quasar_trt.server.errors import ApiError, api_error

_OPEN_PATHS = ("/", "/health", "/version", "/metrics")  # need no key, and are answered while the server stops


class Gate:
    """ASGI middleware. Counts requests, refuses those that may not come in, cancels those whose client has gone, and answers
    for those that failed unexpectedly.

    paths: those that are counted by name.
    """

    def __init__(self, app, backend: Backend, paths: frozenset[str]):
        self._app = app
        self._backend = backend
        self._paths = paths

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = "disconnected"

        async def watched_send(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            with self._backend.visits:
                await self._serve(scope, receive, watched_send)
        except Exception as error:
            refusal = api_error(error)
            if status == "disconnected":
                await refusal.response()(scope, receive, watched_send)
        finally:
            path = scope["path"]
            self._backend.metrics.count_response(path if path in self._paths else "other", status)

    async def _serve(self, scope, receive, send) -> None:
        body = Body(receive, self._backend.options.max_body_bytes)
        try:
            self._check(scope)
        except ApiError as error:
            await error.response()(scope, body.receive, send)
            return
        work = asyncio.create_task(self._app(scope, body.receive, send))
        gone = asyncio.create_task(body.gone())
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            work.cancel()  # unless it is done
        with contextlib.suppress(asyncio.CancelledError):
            await work

    def _check(self, scope) -> None:
        path = scope["path"]
        if path in _OPEN_PATHS or path.startswith("/page/"):
            return
        if self._backend.draining:
            raise ApiError(503, "the server is stopping; ask another one, or later")
        key = self._backend.options.api_key
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        if key is not None and not (scheme.lower() == b"bearer" and secrets.compare_digest(token, key.encode())):
            raise ApiError(
                401, "the API key is missing or wrong; send 'Authorization: Bearer KEY'", code="invalid_api_key"
            )
