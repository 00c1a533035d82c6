"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}} with the HTTP status that fits."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Sequence

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
            return _invalid(error)
    LOG.error("a request failed", exc_info=error)
    return ApiError(500, f"the request failed: {type(error).__name__}: {error}")


async def respond(request: Request, error: Exception) -> JSONResponse:
    """The handler of every exception."""
    shown = api_error(error)
    if shown is not error and shown.status_code in (404, 405):  # the router's own, which name nothing
        shown.detail = f"there is no {request.method} {request.url.path!r}; GET /openapi.json tells what there is"
    return shown.response()


def _invalid(error: RequestValidationError) -> ApiError:
    """From what pydantic found: about the first parameter alone, there the innermost value and all that it may be."""
    errors = error.errors()
    errors = [each for each in errors if each["loc"][1:2] == errors[0]["loc"][1:2]]
    for each in errors:
        if each["type"] == "parameter":  # our own; within a message or the like, that is the parameter
            return ApiError(400, each["msg"], (*each["loc"][1:2], each["ctx"]["name"])[0])
        if each["type"] == "json_invalid":
            return ApiError(400, f"the body is no JSON: {each['ctx']['error']}")
    if not errors[0]["loc"][1:]:
        return ApiError(
            400,
            f"the body is {reprlib.repr(error.body)}; allowed: a JSON object, sent as Content-Type: application/json",
        )
    found = [(*_place(each, error.body), each) for each in errors]
    path, value, innermost = max(found, key=lambda each: (len(each[0]), each[0]))
    if innermost["type"] == "missing":
        return ApiError(400, f"{_written(path)} is missing; give it", path[0])
    allowed = dict.fromkeys(_allowed(each) for place, _, each in found if place == path)
    return ApiError(400, f"{_written(path)} is {reprlib.repr(value)}; allowed: {' or '.join(allowed)}", path[0])


def _place(error: dict, body: object) -> tuple[Sequence[str | int], object]:
    """Where in the body an error is, and what is there; pydantic also names the kinds that it tried a value as."""
    path, value = [], body
    for part in error["loc"][1:]:
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]
            path.append(part)
    return (*path, error["loc"][-1]) if error["type"] == "missing" else tuple(path), value


def _written(path: Sequence[str | int]) -> str:
    """messages[0].content"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


# Of pydantic's errors -> what is allowed; the others say it well enough.
_ALLOWED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "greater_than_equal": "{ge} or more",
    "int_type": "an integer",
    "less_than_equal": "{le} or less",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "none_required": "null",
    "string_too_long": "text of at most {max_length} characters",
    "string_type": "text",
    "too_long": "at most {max_length} of them",
    "too_short": "at least {min_length} of them",
}


def _allowed(error: dict) -> str:
    text = _ALLOWED.get(error["type"])
    return error["msg"] if text is None else text.format(**error.get("ctx", {}))
