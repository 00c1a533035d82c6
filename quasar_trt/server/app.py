"""The application: endpoints, the page, errors in one shape."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

from quasar_trt import __version__
from quasar_trt.errors import QuasarError
from quasar_trt.server import endpoints, status
from quasar_trt.server.backend import Backend
from quasar_trt.server.errors import respond
from quasar_trt.server.gate import Gate
from quasar_trt.server.protocol import ErrorBody

_PAGE = Path(__file__).parent / "page"
_REFUSALS = {
    400: "The request is not in order.",
    401: "The API key is missing or wrong.",
    404: "No such model.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    429: "Too many requests at a time; try again.",
    500: "The engine failed.",
    503: "The server is stopping, or has as many connections as it takes.",
}


def make_app(backend: Backend) -> FastAPI:
    app = FastAPI(
        title="quasar-trt",
        version=__version__,
        docs_url=None,  # they load their programs from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # the place that it names would be what the client says is our host
        responses={code: {"model": ErrorBody, "description": text} for code, text in _REFUSALS.items()},
    )
    app.state.backend = backend
    app.include_router(endpoints.router)
    app.include_router(status.router)
    paths = frozenset(app.openapi()["paths"])
    app.add_api_route("/", _page, include_in_schema=False)
    app.mount("/page", StaticFiles(directory=_PAGE))
    for kind in (QuasarError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, respond)
    app.add_middleware(Gate, backend=backend, paths=paths | {"/"})
    return app


async def _page() -> FileResponse:
    return FileResponse(_PAGE / "index.html", headers={"Content-Security-Policy": "default-src 'self'"})
