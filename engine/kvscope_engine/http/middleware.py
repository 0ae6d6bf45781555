"""ASGI middleware and body parsing that run before every endpoint: access checks and limits."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from kvscope_engine.http.api_state import HttpLimits, api_keys
from kvscope_engine.http.client_limits import ClientLimiter, RequestSlot, client_name, too_large
from kvscope_engine.http.http_connection import MAX_HEAD_BYTES
from kvscope_engine.http.lenient_body import lenient_body
from kvscope_engine.http.schemas.api_errors import ApiError, ClientDisconnected, error_response
from kvscope_engine.http.schemas.request_bodies import IgnoredFields
from kvscope_engine.http.tokenizer_threads import WorkOwner

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS: Final = frozenset(("/", "/health", "/version", "/openapi.json"))
"""Paths that need no API key."""
SLOT: Final = "kvscope.slot"
_Body = TypeVar("_Body")


class AccessMiddleware:
    """Checks the API key or the Host header, and gives each request a `RequestSlot`.

    Without API keys, only addresses and localhost are accepted as Host, which defeats DNS rebinding.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str,
        limits: HttpLimits,
        open_paths: frozenset[str] = frozenset(),
        trust_forwarded: bool = False,
    ) -> None:
        self.clients = ClientLimiter(limits)
        self._app = app
        self._keys = [key.encode() for key in api_keys(api_key)]
        self._open_paths = OPEN_PATHS | open_paths
        self._trust_forwarded = trust_forwarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        slot: RequestSlot | None = None
        try:
            scope["path"] = scope["path"].rstrip("/") or "/"  # some clients add a slash to the base URL
            _check_size(scope)
            headers = Headers(scope=scope)
            key = self._check(scope["path"], headers)
            slot = scope[SLOT] = self.clients.slot(self._name(key, scope, headers))
            await self._app(scope, receive, send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        finally:
            if slot is not None:
                slot.leave()

    def _check(self, path: str, headers: Headers) -> str:
        """Return the API key that was sent; "" if there was none. Raises ApiError if access is denied."""
        if not self._keys:
            _check_host(headers.get("host", ""))
            return ""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        sent_key = token.strip().encode("utf-8", "surrogateescape")
        matching = [key for key in self._keys if hmac.compare_digest(sent_key, key)]
        if scheme.lower() == "bearer" and matching:
            return matching[0].decode()
        if path not in self._open_paths:
            raise ApiError(401, "missing or invalid API key (Authorization: Bearer KEY)", code="invalid_api_key")
        return ""

    def _name(self, key: str, scope: Scope, headers: Headers) -> str:
        forwarded = headers.getlist("x-forwarded-for") if self._trust_forwarded else ()
        address = scope["client"][0] if scope.get("client") else ""
        return client_name(key if len(self._keys) > 1 else "", address, forwarded)


async def read_body(request: Request, kind: type[_Body], limits: HttpLimits) -> _Body:
    """Read and decode the body as `kind`, and count the request as in progress. Raises ApiError.

    The bytes of the body count towards the limit on bodies until the slot's `release_body` is called or the request
    ends.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body is not accepted: Content-Type: application/json is")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limits.max_body_bytes:
        raise too_large(limits)
    slot = slot_of(request)
    try:
        async with asyncio.timeout(limits.body_s):
            data = await _read_all(request, slot, limits.chunk_s)
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time: closing the connection") from None
    except ClientDisconnect:
        raise ClientDisconnected from None
    slot.enter()
    return _decode_body(data, kind)


def slot_of(request: Request) -> RequestSlot:
    slot: RequestSlot = request.scope[SLOT]
    return slot


def owner_of(request: Request) -> WorkOwner:
    """Return the key of the request's work in fair queues: the client, and the request as a batch of that client."""
    return WorkOwner(slot_of(request).client, str(id(request.scope)))


async def _read_all(request: Request, slot: RequestSlot, chunk_s: float) -> bytes:
    chunks: list[bytes] = []
    stream = request.stream()
    while True:
        async with asyncio.timeout(chunk_s):
            chunk = await anext(stream, None)
        if chunk is None:
            return b"".join(chunks)
        slot.count_body_bytes(len(chunk))
        chunks.append(chunk)


def _decode_body(data: bytes, kind: type[_Body]) -> _Body:
    try:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError:
            if not issubclass(kind, IgnoredFields):
                raise
            return lenient_body(data, kind)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error.reason}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise ApiError(400, f"the body is not accepted: {error}", param=_field(str(error))) from None


def _field(message: str) -> str | None:
    """Return the field named by a msgspec error message: "... - at `$.messages[0].role`", "... unknown field `x`"."""
    _, separator, path = message.rpartition("`$.")
    if separator:
        return path.rstrip("`")[:100]
    before, separator, name = message.partition("field `")
    return name.rstrip("`")[:100] if separator and before.endswith(("unknown ", "required ")) else None


def _check_size(scope: Scope) -> None:
    """Raise ApiError for a request head above `MAX_HEAD_BYTES`. h11 does not measure a head that arrived in a single
    read.
    """
    num_bytes = len(scope["raw_path"]) + len(scope["query_string"])
    num_bytes += sum(len(name) + len(value) for name, value in scope["headers"])
    if num_bytes > MAX_HEAD_BYTES:
        raise ApiError(431, f"a head of {num_bytes} bytes is not accepted: must be at most {MAX_HEAD_BYTES}")


def _check_host(host: str) -> None:
    """Raise ApiError for a host name that a web page could make resolve to this machine (DNS rebinding)."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if not name or name == "localhost" or name.endswith(".localhost"):
        return
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        message = f"host {name!r:.80} is not accepted without an API key: an address or localhost is"
        raise ApiError(403, message) from None
