"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}} with the HTTP status that fits."""

from __future__ import annotations

import logging

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from quasar_trt.errors import QuasarError, RequestFailed, RunnerBusy
from quasar_trt.server.protocol import ChatRequest, CompletionRequest, utf8

LOG = logging.getLogger("quasar_trt.server")
RETRY_SECONDS = 1
_PARAMETERS = {*CompletionRequest.model_fields, *ChatRequest.model_fields}
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(HTTPException):
    """What a client is told instead of an answer. param: the parameter that is wrong; code: for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(status, utf8(message), _headers(status))
        self.param = param and utf8(param)
        self.code = code

    def body(self) -> dict[str, object]:
        kind = _TYPES.get(self.status_code, "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status_code, self.headers)


def _headers(status: int) -> dict[str, str]:
    if status == 401:
        return {"WWW-Authenticate": "Bearer", "Connection": "close"}
    if status == 429:
        return {"Retry-After": str(RETRY_SECONDS)}
    if status in (408, 413, 503):  # whoever sent it should not send more on this connection
        return {"Connection": "close"}
    return {}


def api_error(error: BaseException) -> ApiError:
    """What a client is told about any exception."""
    match error:
        case ApiError():
            return error
        case RunnerBusy():
            return ApiError(429, str(error), code="queue_full")
        case RequestFailed():
            return ApiError(500, str(error))
        case QuasarError():
            # "temperature is ...", "the prompt has ..."
            named = [word for word in str(error).split(" ", 2)[:2] if word in _PARAMETERS]
            return ApiError(400, str(error), *named[:1])
        case HTTPException():
            message = f"the body is no JSON: {error.__cause__}" if error.__cause__ else error.detail
            shown = ApiError(error.status_code, message)
            shown.headers |= error.headers or {}
            return shown
        case RequestValidationError():
            return _invalid(error.errors())
    LOG.error("a request failed", exc_info=error)
    return ApiError(500, f"the request failed: {type(error).__name__}: {error}")


async def respond(request: Request, error: Exception) -> JSONResponse:
    """The handler of every exception."""
    return api_error(error).response()


def _invalid(errors: list[dict]) -> ApiError:
    """From what pydantic found: about the first parameter alone, whatever it may be instead in one line."""
    first = errors[0]
    if first["type"] == "parameter":  # our own; within a message or the like, that is the parameter
        return ApiError(400, first["msg"], (*first["loc"][1:2], first["ctx"]["name"])[0])
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['ctx']['error']}")
    path = [str(part) for part in first["loc"][1:]]
    if not path:
        return ApiError(400, f"the body is no JSON object: {first['msg']}; send one as Content-Type: application/json")
    name = path[0]
    if first["type"] == "missing":
        return ApiError(400, f"{'.'.join(path)} is missing", name)
    said = dict.fromkeys(error["msg"] for error in errors if error["loc"][1:2] == first["loc"][1:2])
    return ApiError(400, f"{name} is not allowed: {', or '.join(said)}", name)
