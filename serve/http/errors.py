"""Errors as OpenAI's body, whatever raised them."""

import logging
import re
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from serve.http.backend import Unavailable

log = logging.getLogger(__name__)

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
UNION_BRANCH = re.compile(r"\[|^(str|int|float|bool|constrained-.*|[A-Z]\w+)$")  # in the location of an error
RETRY = {429: "1", 503: "5"}  # seconds after which a client may try again


class ApiError(Exception):
    """A refusal with its status; `param` is the field to blame, `code` a name that programs can test."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def bad(param: str | None, message: str) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param)


def error_body(error: ApiError) -> dict[str, Any]:
    """OpenAI's nested error, and the same fields flat for clients that read those."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    fields = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": fields, "object": "error", **fields}


def error_response(error: ApiError) -> JSONResponse:
    headers = {"Retry-After": RETRY[error.status]} if error.status in RETRY else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), error.status, headers)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about any exception; unknown ones are logged and say nothing of their inside."""
    match error:
        case ApiError():
            return error
        case Unavailable():
            return ApiError(503, str(error) or "the engine takes no requests now; try again later", code="unavailable")
        case NotImplementedError() | ValueError():
            return ApiError(400, str(error))
        case RequestValidationError():
            return _validation_error(error)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail or HTTPStatus(error.status_code).phrase))
    log.error("request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def _validation_error(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it does not parse")
        return ApiError(400, f"the body is not JSON ({reason} at {first['loc'][-1]}); send one JSON object")
    path = [part for part in path if not UNION_BRANCH.search(part)]
    name = ".".join(path) or None
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing" or name is None:
        return ApiError(400, f"{name or 'the body'}: {reason}; send a JSON object with the documented fields", name)
    shown = repr(first["input"])
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return ApiError(400, f"{name} is {shown}: {reason}; see /docs for what it may be", name)


def add_error_handlers(app: FastAPI) -> None:
    async def handle(request: Request, error: Exception) -> JSONResponse:
        response = error_response(as_api_error(error))
        if isinstance(error, HTTPException):
            response.headers.update(error.headers or {})  # such as Allow
        return response

    for kind in (ApiError, Unavailable, ValueError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)
