"""One HTTP/1.1 connection: uvicorn's protocol with timeouts for heads and unread output, and server-sent events.

Enforces the limit on connections. Malformed HTTP also gets an error in OpenAI's format. If a proxy could find a
different end of a head or of its body, the head is refused before h11 parses it, and the connection is closed, which
prevents request smuggling. Streams are not buffered: a client that reads slowly blocks only its own task, and its
replies wait in its inbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import h11
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from kvscope_engine.http.api_state import HttpLimits
from kvscope_engine.http.schemas.api_errors import ApiError, ClientDisconnected

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

HEAD_END_PATTERN: Final = re.compile(rb"\n\r?\n")
"""Matches the end of a request head, as h11 recognizes it."""
HTTP_VERSION_PATTERN: Final = re.compile(rb" HTTP/([0-9]+(?:\.[0-9]+)?)$")
MAX_HEAD_BYTES: Final = 32 << 10
SLICE_BYTES: Final = 4 << 10
"""Maximum bytes of one connection that are parsed before other connections are served."""
FREE_CHUNKS: Final = 2048
"""Number of chunks of a body that may have any size. If there are more, chunks must average `MIN_CHUNK_BYTES`."""
MIN_CHUNK_BYTES: Final = 256
CONNECTION_KEY: Final = "kvscope.connection"
DONE_EVENT: Final = b"data: [DONE]\n\n"
COMMENT: Final = b": waiting\n\n"
"""Comment line in a stream, which clients ignore. It keeps proxies and clients from closing a silent connection."""
TEXT_PLACEHOLDER: Final = "\0the text\0"
STOPPING_MESSAGE: Final = "the server is stopping"
STREAM_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
Events = AsyncGenerator[bytes, None]
_Result = TypeVar("_Result")
_ENCODER: Final = msgspec.json.Encoder()


class HttpConnection(H11Protocol):
    """Protocol of one connection, created by uvicorn. `bounded_connection_class` returns a subclass with its `limits`
    and `max_connections` set.
    """

    limits = HttpLimits()
    max_connections = 1 << 20
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _next_slice: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.conn = _StrictConnection(h11.SERVER, self.config.h11_max_incomplete_event_size or MAX_HEAD_BYTES)
        self._unparsed = bytearray()
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._answer(503, f"{self.max_connections} connections are open already: no more are accepted")
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        if self._next_slice is not None:
            self._next_slice.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse `data` in slices, and let the event loop run between them.

        h11 takes about 20 us per chunk, so that 256 kB of one-byte chunks would block all clients for a second.
        """
        self._unparsed += data
        if self._next_slice is None:
            self._parse_slice()
        else:
            self.transport.pause_reading()  # flow control resumed it meanwhile

    def _parse_slice(self) -> None:
        self._next_slice = None
        data = bytes(self._unparsed[:SLICE_BYTES])
        del self._unparsed[:SLICE_BYTES]
        self._parse(data)
        if self.transport.is_closing():
            return
        if self._unparsed:
            self.transport.pause_reading()
            self._next_slice = self.loop.call_soon(self._parse_slice)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_head_timer()
        elif self._head_timer is None and self.conn.trailing_data[0]:
            self._expect_head()  # of a further request on this connection

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:
            self.scope[CONNECTION_KEY] = self  # type: ignore[typeddict-unknown-key]

    async def write_piece(self, data: bytes) -> None:
        """Write a further part of a response of unknown length, at half the cost of ASGI's `send`.

        Waits while the client does not read. Data written after a disconnect is dropped.
        """
        if self.flow.write_paused:
            await self.flow.drain()
        if data and not self.transport.is_closing():
            is_chunked = self.conn.their_http_version != b"1.0"
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def send_400_response(self, msg: str) -> None:
        self._stop_timers()
        refusal = self.conn.refusal if isinstance(self.conn, _StrictConnection) else None
        self._answer(*(refusal or (400, "not an HTTP/1.1 request, or its head is too large")))

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.header_s, self._refuse_late_head)

    def _refuse_late_head(self) -> None:
        self._head_timer = None
        self._answer(408, "the request did not arrive in time: closing the connection")

    def _answer(self, status: int, message: str) -> None:
        """Send an error, unless a response has already been sent, and close the connection."""
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(ApiError(status, message).body)
            head: list[tuple[bytes, bytes]] = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            response = h11.Response(status_code=status, headers=head, reason=STATUS_PHRASES[status])
            events: tuple[Any, ...] = (response, h11.Data(data=body), h11.EndOfMessage())
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_timers(self) -> None:
        self._stop_head_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class _StrictConnection(h11.Connection):
    """h11 connection that checks each head before parsing and refuses bodies that consist of tiny chunks."""

    refusal: tuple[int, str] | None = None
    """HTTP status and message of the refusal; None if nothing was refused."""
    _num_chunks = _num_chunk_bytes = 0

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            end = HEAD_END_PATTERN.search(data := self.trailing_data[0])
            self.refusal = head_refusal(data[: end.end()]) if end is not None else None
            self._num_chunks = self._num_chunk_bytes = 0
            self._raise_refusal()
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_end
            self._num_chunk_bytes += len(event.data)
            if self._num_chunks > FREE_CHUNKS + self._num_chunk_bytes // MIN_CHUNK_BYTES:
                self.refusal = 400, f"a body of {self._num_chunks} chunks is not accepted: send larger chunks"
                self._raise_refusal()
        return event

    def _raise_refusal(self) -> None:
        if self.refusal is not None:
            raise h11.RemoteProtocolError(self.refusal[1], error_status_hint=self.refusal[0])


def head_refusal(head: bytes) -> tuple[int, str] | None:
    """Return HTTP status and message if the head could be interpreted in several ways; None if it is accepted.

    Checks RFC 9112, sections 2.2, 2.3, 5.2, 6.1 and 6.3. Data that is not a head at all is left to h11.
    """
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if any(b"\r" in line or b"\n" in line for line in (first, *lines)):
        return 400, "a header line does not end with CR LF, or contains CR or LF"
    version = HTTP_VERSION_PATTERN.search(first)
    if version is not None and version[1] not in (b"1.0", b"1.1"):
        return 505, f"HTTP/{version[1].decode()} is not accepted: use HTTP/1.1"
    if any(line[:1] in (b" ", b"\t") for line in lines):
        return 400, "folded headers are not accepted"
    fields = [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    lengths = [value for name, value in fields if name.strip() == b"content-length"]
    codings = [value for name, value in fields if name.strip() == b"transfer-encoding"]
    if len(lengths) > 1 or any(not value.isdigit() for value in lengths):
        return 400, "Content-Length is not accepted: it must be one number"
    if codings and (lengths or (version is not None and version[1] == b"1.0")):
        return 400, "Transfer-Encoding is not accepted together with Content-Length, nor in HTTP/1.0"
    if codings and [value.lower() for value in codings] != [b"chunked"]:
        return 501, "Transfer-Encoding is not accepted: only chunked is"
    return None


def bounded_connection_class(limits: HttpLimits, max_connections: int) -> type[HttpConnection]:
    return type("BoundedConnection", (HttpConnection,), {"limits": limits, "max_connections": max_connections})


def encode_events(chunks: Iterable[msgspec.Struct]) -> bytes:
    return b"".join(b"data: " + _ENCODER.encode(chunk) + b"\n\n" for chunk in chunks)


class TextEvents:
    """Encodes events that differ only in a text. `chunk` returns the event for a choice index and a text.
    Everything around the text is encoded only once per choice.
    """

    def __init__(self, chunk: Callable[[int, str], msgspec.Struct]) -> None:
        self._chunk = chunk
        self._event_parts: dict[int, tuple[bytes, bytes]] = {}

    def event(self, number: int, text: str) -> bytes:
        parts = self._event_parts.get(number)
        if parts is None:
            before, _, after = encode_events([self._chunk(number, TEXT_PLACEHOLDER)]).partition(
                _ENCODER.encode(TEXT_PLACEHOLDER)
            )
            parts = self._event_parts[number] = (before, after)
        return parts[0] + _ENCODER.encode(text) + parts[1]


async def cancel_on_disconnect(request: Request, work: Awaitable[_Result]) -> _Result:
    """Return the result of `work`. If the client hangs up first, cancel `work` and raise ClientDisconnected.

    The request's body must have been read before.
    """
    work_task, disconnect_task = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((work_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise ClientDisconnected
        return work_task.result()
    finally:
        for task in (work_task, disconnect_task):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await work_task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Response that streams `events`. An error is sent as the last event; `close` is always called at the end."""

    comment_s = 10.0
    """Seconds without an event after which a comment is sent. The actual interval is up to twice as long."""

    def __init__(
        self,
        request: Request,
        events: Events,
        close: Callable[[], None],
        *,
        end: bytes = DONE_EVENT,
        encode_error: Callable[[ApiError], bytes] = lambda error: encode_events([error.body]),
    ) -> None:
        """`end`: data after the last event."""
        super().__init__(headers=STREAM_HEADERS, media_type="text/event-stream")
        self._end = end
        self._encode_error = encode_error
        del self.headers["content-length"]
        self._request = request
        self._events = events
        self._close = close
        self._num_written = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            connection = scope.get(CONNECTION_KEY)
            write = connection.write_piece if isinstance(connection, HttpConnection) else _asgi_writer(send)
            await cancel_on_disconnect(self._request, self._pump(send, write))
        except ClientDisconnected:
            pass
        except asyncio.CancelledError:
            error = self._encode_error(ApiError(503, STOPPING_MESSAGE))
            with contextlib.suppress(Exception):
                await send({"type": "http.response.body", "body": error, "more_body": False})
        finally:
            self._close()
            await self._events.aclose()

    async def _pump(self, send: Send, write: Callable[[bytes], Awaitable[None]]) -> None:
        last = self._end
        comments = asyncio.ensure_future(self._send_comments(write))
        try:
            async for data in self._events:
                await write(data)
                self._num_written += 1
        except ApiError as error:
            last = self._encode_error(error)
        finally:
            comments.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await comments
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_comments(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write a comment after each period of `comment_s` seconds in which no event was written."""
        while True:
            num_written = self._num_written
            await asyncio.sleep(self.comment_s)
            if num_written == self._num_written:
                await write(COMMENT)


def _asgi_writer(send: Send) -> Callable[[bytes], Awaitable[None]]:
    async def write(data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})

    return write
