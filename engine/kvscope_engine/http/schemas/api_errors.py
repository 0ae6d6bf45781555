"""Errors in OpenAI's format, and the mapping from the engine's reasons to HTTP status codes.

ApiError                a status, and one line that names the value and what is accepted
    ClientDisconnected  the client hung up: no response is sent
"""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.responses import Response

from kvscope_telemetry.transport.client_sockets import NO_ENGINE

RETRY_AFTER_S: Final = 1
ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
"""OpenAI's error `type` by status; other 4xx are "invalid_request_error", other 5xx "server_error"."""
BUSY_PHRASES: Final = ("the engine is behind", " already, and ")
"""Phrases that the engine's reason for a refusal contains only if the refusal is temporary.

" already, and " occurs in the reasons of `server.service_limits`, as in "8 requests are open already, and 1 more is
beyond the limit".
"""
UNAVAILABLE_PREFIXES: Final = (
    NO_ENGINE,
    "the engine has ended",
    "the engine is loading",
    "the engine died",
    "the connection ",
)
"""Beginnings of the reasons if there is no engine that could have processed the request."""


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(Exception):
    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> ErrorBody:
        kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return ErrorBody(ErrorDetail(single_line(str(self)), kind, self.param, self.code))


class ClientDisconnected(ApiError):
    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection")


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if error.status in (429, 503):
        headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    if error.status == 401:
        headers.setdefault("WWW-Authenticate", "Bearer")
    body = msgspec.json.encode(error.body)
    return Response(body, error.status, headers, media_type="application/json")


def refusal_error(reason: str) -> ApiError:
    """Return the error for a request that the engine refused."""
    if any(phrase in reason for phrase in BUSY_PHRASES):
        return ApiError(429, reason, code="engine_busy")
    if reason.startswith(UNAVAILABLE_PREFIXES):
        return ApiError(503, reason, code="engine_away")
    if reason.startswith("the engine failed"):
        return ApiError(500, reason)
    if " is for operators: " in reason:  # a wrong setup of this server, which the client cannot fix: not 403
        return ApiError(503, f"this server's key may not submit: {reason}")
    if reason.startswith("LoRA adapter ") and " is not loaded: " in reason:
        return ApiError(404, reason, param="model", code="model_not_found")
    return ApiError(400, reason, code="context_length_exceeded" if reason.startswith("the prompt has ") else None)


def failure_error(reason: str) -> ApiError:
    """Return the error for a request that the engine ended with an error."""
    is_away = reason.startswith(UNAVAILABLE_PREFIXES)
    return ApiError(503 if is_away else 500, reason or "the engine ended the request with an error")


def single_line(text: str) -> str:
    """Return `text` on one line, encodable as UTF-8 (lone surrogates are escaped), with at most 1000 characters."""
    return " ".join(text.encode("utf-8", "backslashreplace").decode().split())[:1000]
