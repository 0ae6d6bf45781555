"""Before every endpoint: who may come in, how many at a time, and how a body is read.

Owns the counts of requests and of bytes of bodies. Knows no endpoint but those open to all.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from kvscope_engine.http.api import HttpLimits
from kvscope_engine.http.shapes.errors import ApiError, ClientGone, error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS: Final = frozenset(("/health", "/version", "/openapi.json"))
"""Without an API key."""
MAX_HEAD_BYTES: Final = 32 << 10
"""Of a request's first line and headers."""
SLOT: Final = "kvscope.slot"
_Body = TypeVar("_Body")


class Gate:
    """ASGI middleware. Without an API key only this machine's own names are believed as hosts."""

    def __init__(
        self, app: ASGIApp, *, api_key: str, limits: HttpLimits, open_paths: frozenset[str] = frozenset()
    ) -> None:
        self.num_requests = 0
        self.num_body_bytes = 0
        self.limits = limits
        self._app = app
        self._api_key = api_key.encode()
        self._open_paths = OPEN_PATHS | open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        slot = scope[SLOT] = Slot(self)
        try:
            _check_size(scope)
            self._check(scope["path"], Headers(scope=scope))
            await self._app(scope, receive, send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        finally:
            slot.leave()

    def _check(self, path: str, headers: Headers) -> None:
        if not self._api_key:
            _check_host(headers.get("host", ""))
        elif path not in self._open_paths:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            given = token.strip().encode("utf-8", "surrogateescape")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given, self._api_key):
                raise ApiError(401, "no valid API key is given: Authorization: Bearer KEY", code="invalid_api_key")


class Slot:
    """One request's place among those being answered, and the bytes of its body."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._is_in = False
        self._num_bytes = 0

    def enter(self) -> None:
        """Take a place. Raises ApiError with 429 when there is none."""
        if self._gate.num_requests >= self._gate.limits.max_requests:
            message = f"{self._gate.num_requests} requests are being answered already, no more are taken"
            raise ApiError(429, message, code="server_busy")
        self._is_in = True
        self._gate.num_requests += 1

    def add(self, num_bytes: int) -> None:
        """More of its body came. Raises ApiError when it is, or all bodies are, too large."""
        limits = self._gate.limits
        self._num_bytes += num_bytes
        self._gate.num_body_bytes += num_bytes
        if self._num_bytes > limits.max_body_bytes:
            raise too_large(limits)
        if self._gate.num_body_bytes > limits.max_bodies_bytes:
            raise ApiError(429, "too many bodies are being read at a time", code="server_busy")

    def give_body(self) -> None:
        """Its body was read, and is no more than what it says."""
        self._gate.num_body_bytes -= self._num_bytes
        self._num_bytes = 0

    def leave(self) -> None:
        """It is over."""
        self.give_body()
        if self._is_in:
            self._is_in = False
            self._gate.num_requests -= 1


def too_large(limits: HttpLimits) -> ApiError:
    """For a body beyond the limit."""
    return ApiError(413, f"a body of more than {limits.max_body_bytes} bytes is not accepted")


async def read_body(request: Request, kind: type[_Body], limits: HttpLimits) -> _Body:
    """The body as `kind`, and a place among those being answered. Raises ApiError."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body is not accepted: Content-Type: application/json is")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limits.max_body_bytes:
        raise too_large(limits)
    slot: Slot = request.scope[SLOT]
    try:
        async with asyncio.timeout(limits.body_s):
            data = await _all_of(request, slot, limits.chunk_s)
    except TimeoutError:
        raise ApiError(408, "the body does not come: the connection is closed") from None
    except ClientDisconnect:
        raise ClientGone from None
    slot.enter()
    try:
        return _decoded(data, kind)
    finally:
        slot.give_body()


async def _all_of(request: Request, slot: Slot, chunk_s: float) -> bytes:
    chunks: list[bytes] = []
    stream = request.stream()
    while True:
        async with asyncio.timeout(chunk_s):
            chunk = await anext(stream, None)
        if chunk is None:
            return b"".join(chunks)
        slot.add(len(chunk))
        chunks.append(chunk)


def _decoded(data: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(data, type=kind)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error.reason}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deep") from None
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise ApiError(400, f"the body is not accepted: {error}", param=_field(str(error))) from None


def _field(message: str) -> str | None:
    """The field that msgspec complains of: "… - at `$.messages[0].role`", "… unknown field `x`"."""
    _, found, path = message.rpartition("`$.")
    if found:
        return path.rstrip("`")[:100]
    before, found, name = message.partition("field `")
    return name.rstrip("`")[:100] if found and before.endswith(("unknown ", "required ")) else None


def _check_size(scope: Scope) -> None:
    """A head that came all at once was not measured before."""
    num_bytes = len(scope["raw_path"]) + len(scope["query_string"])
    num_bytes += sum(len(name) + len(value) for name, value in scope["headers"])
    if num_bytes > MAX_HEAD_BYTES:
        raise ApiError(431, f"a head of {num_bytes} bytes is not accepted: at most {MAX_HEAD_BYTES}")


def _check_host(host: str) -> None:
    """Raise ApiError for a name that a page in somebody's browser could have made up for this machine."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if not name or name == "localhost" or name.endswith(".localhost"):
        return
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        message = f"host {name!r:.80} is not accepted without an API key: an address or localhost is"
        raise ApiError(403, message) from None
