"""Answers that need the client to be there: whole ones that end when it hangs up, and streams of server-sent events.

Nothing is buffered here: a client that reads slowly holds up its own task, and what waits for it waits in its inbox.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvscope_engine.http.protocol import CONNECTION, Connection
from kvscope_engine.http.shapes.errors import ApiError, ClientGone

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

DONE: Final = b"data: [DONE]\n\n"
MARK: Final = "\0the text\0"
STOPPING: Final = "the server is stopping"
HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
Events = AsyncGenerator[bytes, None]
_Result = TypeVar("_Result")
_ENCODER: Final = msgspec.json.Encoder()


def encoded(chunks: Iterable[msgspec.Struct]) -> bytes:
    """Events for all of them, in one piece."""
    return b"".join(b"data: " + _ENCODER.encode(chunk) + b"\n\n" for chunk in chunks)


class TextEvents:
    """Events that differ in a text alone: what is around it is written once for each choice, by `chunk`."""

    def __init__(self, chunk: Callable[[int, str], msgspec.Struct]) -> None:
        self._chunk = chunk
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, number: int, text: str) -> bytes:
        """Of the choice of this number."""
        around = self._around.get(number)
        if around is None:
            before, _, after = encoded([self._chunk(number, MARK)]).partition(_ENCODER.encode(MARK))
            around = self._around[number] = (before, after)
        return around[0] + _ENCODER.encode(text) + around[1]


async def unless_gone(request: Request, work: Awaitable[_Result]) -> _Result:
    """What `work` gives; cancelled, and ClientGone raised, when the client hangs up first. The body was read before."""
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(_hang_up(request))
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGone
        return doing.result()
    finally:
        for task in (doing, gone):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await doing


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of `events`; `close` is called at its end, whatever it is. An error in the middle is its last event."""

    def __init__(self, request: Request, events: Events, close: Callable[[], None]) -> None:
        super().__init__(headers=HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._request = request
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            connection = scope.get(CONNECTION)
            write = connection.write_piece if isinstance(connection, Connection) else _through(send)
            await unless_gone(self._request, self._pump(send, write))
        except ClientGone:
            pass
        except asyncio.CancelledError:
            error = ApiError(503, STOPPING).body
            with contextlib.suppress(Exception):
                await send({"type": "http.response.body", "body": encoded([error]), "more_body": False})
        finally:
            self._close()
            await self._events.aclose()

    async def _pump(self, send: Send, write: Callable[[bytes], Awaitable[None]]) -> None:
        last = DONE
        try:
            async for data in self._events:
                await write(data)
        except ApiError as error:
            last = encoded([error.body])
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _through(send: Send) -> Callable[[bytes], Awaitable[None]]:
    async def write(data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})

    return write
