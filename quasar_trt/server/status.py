"""What operators and programs ask about the server itself."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from quasar_trt import __version__
from quasar_trt.server.backend import Backend
from quasar_trt.server.endpoints import backend_of
from quasar_trt.server.errors import ApiError

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """200 while requests are taken, else 503."""
    backend = backend_of(request)
    if backend.runner.failure:
        raise ApiError(503, str(backend.runner.failure))
    if backend.draining:
        raise ApiError(503, "the server is stopping")
    return {"status": "ok"}


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """In Prometheus' text format."""
    backend = backend_of(request)
    text, content_type = backend.metrics.render(*await backend.runner.metrics())
    return Response(text, media_type=content_type)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, object]:
    return {"object": "list", "data": [_model(backend_of(request))]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, object]:
    backend = backend_of(request)
    backend.check_model(name)
    return _model(backend)


def _model(backend: Backend) -> dict[str, object]:
    return {
        "id": backend.options.served_model_name,
        "object": "model",
        "created": backend.created,
        "owned_by": "quasar-trt",
        "max_model_len": backend.max_seq_len,
        "drafter": backend.options.drafter,
    }
