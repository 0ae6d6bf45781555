"""A client of the engine: one thread on the command socket, and on the event loop whose answer is whose.

Owns the connection over the engine's restarts, and every request that has not ended. An engine that goes away ends
what it had with an error, and is waited for. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from msgspec.structs import replace

from kvscope_telemetry.errors import EngineDead, ProtocolError
from kvscope_telemetry.messages.commands import (
    Abort,
    Accepted,
    Done,
    Failed,
    Finished,
    GetStatus,
    LoadAdapter,
    Refused,
    Reply,
    RequestTiming,
    Status,
    Submit,
    Tokens,
    UnloadAdapter,
    Usage,
)
from kvscope_telemetry.messages.wire import decode_reply, encode
from kvscope_telemetry.sockets.client_sockets import NO_ENGINE, AwaitedRequests, ClientSockets, Outgoing
from kvscope_telemetry.sockets.connections import key_for

Said: TypeAlias = Accepted | Refused | Tokens | Finished

MAX_REPLIES: Final = 4_096
"""Read in one pass."""
NAP_S: Final = 0.001
"""Before what came is read where several requests are open, so that it is the tokens of a whole step, and the loop is
woken once for all of them."""
TICK_MS: Final = 250
OWN_TAGS: Final = 2
"""Smaller ones are the thread's."""
ASK_READY_S: Final = 5.0
ASK_S: Final = 0.25
AWAY_S: Final = 5.0
"""How long requests outlive a tcp connection that broke; over ipc it ends with the engine's process."""
AWAY: Final = f"{NO_ENGINE}: its connection is lost"
MISSED: Final = "the connection broke, and a part of the answer was not kept"
MAX_STREAM_BYTES: Final = 4 << 20
"""That wait for a client who reads too slowly; then its request ends."""
MAX_WHOLE_BYTES: Final = 64 << 20
"""Of an answer that is told at its end."""
SAID_OVERHEAD_BYTES: Final = 200


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    inbox: Inbox
    prompt: int
    num_left: int
    abort: Abort
    """To be sent when nobody wants it any more."""


class EngineClient:
    """To the engine at `endpoint`; `start` and all but `close` are the event loop's. Raises BadInput as `key_for`."""

    def __init__(self, endpoint: str, *, key: Path | None = None) -> None:
        self.status: Status | None = None
        """The engine's latest; None while there is no engine."""
        self.heard_s = 0.0
        """When it was told (monotonic)."""
        self.refusal = ""
        """Why the engine does not let us in."""
        self._endpoint = endpoint
        self._sockets = ClientSockets(endpoint, key=key_for(endpoint, key), subscribes=False)
        self._outgoing = Outgoing()
        self._open: dict[str, _Open] = {}
        self._asked: dict[int, asyncio.Future[Reply]] = {}
        self._next_tag = OWN_TAGS
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvscope-engine-line", daemon=True)
        # The thread's alone:
        self._awaited = AwaitedRequests()
        self._session = ""
        self._num_introduced = -1
        self._asked_s = 0.0
        self._away_s: float | None = 0.0

    def start(self) -> None:
        """Connect, from within the loop that is told of everything."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """End the thread and the connection; requests that have not ended are aborted."""
        self._closing = True
        if self._thread.is_alive():
            self._sockets.wake()
            self._thread.join()
        else:
            self._sockets.close()

    @property
    def num_open(self) -> int:
        """Prompts that have not ended."""
        return len(self._open)

    def submit(self, submit: Submit, inbox: Inbox, prompt: int) -> None:
        """Send it; what is said of it comes into `inbox` as of this prompt. Raises BadInput, EngineDead."""
        if self.status is None:
            raise EngineDead(NO_ENGINE)
        self._outgoing.put(submit)
        abort = Abort(request_id=submit.request_id, client=submit.client, batch=submit.batch)
        self._open[submit.request_id] = _Open(inbox, prompt, max(1, submit.sampling.n), abort)
        self._sockets.wake()

    async def ask(self, command: LoadAdapter | UnloadAdapter) -> Done | Failed:
        """The engine's answer, with `status` as it is from then on. Raises EngineDead when there is none."""
        if self.status is None:
            raise EngineDead(NO_ENGINE)
        reply = await self._answer(command)
        await self.refresh()
        assert isinstance(reply, Done | Failed), "these are answered so"
        return reply

    async def refresh(self) -> None:
        """`status` is as of now. Raises EngineDead."""
        await self._answer(GetStatus())

    async def _answer(self, command: LoadAdapter | UnloadAdapter | GetStatus) -> Reply:
        tag = self._next_tag
        self._next_tag += 1
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._asked[tag] = future
        try:
            self._outgoing.put(replace(command, tag=tag))
            self._sockets.wake()
            return await future
        finally:
            del self._asked[tag]

    def abandon(self, request_id: str) -> None:
        """Nobody wants it any more: it is aborted, unless it has ended."""
        request = self._open.pop(request_id, None)
        if request is not None:
            self._abort(request.abort)

    def _abort(self, abort: Abort) -> None:
        with contextlib.suppress(EngineDead):  # then it has no engine to run on
            self._outgoing.put(abort)
            self._sockets.wake()

    # On the loop, called by the thread.

    def _deliver(self, replies: list[tuple[Reply, int]]) -> None:
        for reply, num_bytes in replies:
            if isinstance(reply, Status):
                self.status, self.heard_s = reply, time.monotonic()
            elif isinstance(reply, Accepted | Refused | Tokens | Finished):
                self._hand(reply, num_bytes)
            elif isinstance(reply, Failed) and reply.request_id:
                self._hand(Refused(request_id=reply.request_id, reason=reply.reason), num_bytes)
            future = self._asked.get(reply.tag) if isinstance(reply, Status | Done | Failed) else None
            if future is not None and not future.done():
                future.set_result(reply)

    def _hand(self, reply: Said, num_bytes: int) -> None:
        request = self._open.get(reply.request_id)
        if request is None:
            if isinstance(reply, Accepted):  # by an engine that came after it was given up
                self._abort(Abort(request_id=reply.request_id))
            return
        if isinstance(reply, Tokens) and reply.num_missed:
            self.abandon(reply.request_id)
            reply = _lost(reply.request_id, MISSED)
        elif isinstance(reply, Finished):
            request.num_left -= 1
            if not request.num_left:
                del self._open[reply.request_id]
        elif isinstance(reply, Refused):
            del self._open[reply.request_id]
        request.inbox.put(request.prompt, reply, num_bytes)

    def _lose_all(self, refusal: str) -> None:
        """The engine is gone."""
        self.status, self.refusal = None, refusal
        lost, self._open = self._open, {}
        for request_id, request in lost.items():
            request.inbox.put(request.prompt, _lost(request_id, AWAY), 0)
        self._lose_asked()

    def _lose_asked(self) -> None:
        """What was asked by tag may have been answered on a connection that broke."""
        for future in self._asked.values():
            if not future.done():
                future.set_exception(EngineDead(AWAY))

    # The thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._pass()
        finally:
            self._withdraw()
            self._sockets.close()

    def _pass(self) -> None:
        self._sockets.wait(TICK_MS)
        if len(self._open) > 1:
            time.sleep(NAP_S)
        replies = [reply for data in self._sockets.receive_replies(MAX_REPLIES) if (reply := self._read(data))]
        self._tell(replies)
        self._look(time.monotonic())
        refusals: list[tuple[Reply, int]] = [(reply, 0) for reply in self._outgoing.expired(time.monotonic_ns())]
        self._tell(refusals)

    def _read(self, data: bytes) -> tuple[Reply, int] | None:
        try:
            reply = decode_reply(data)
        except ProtocolError:  # of a later version, or nonsense: there is nobody to tell it to
            return None
        self._awaited.heard(reply)
        return reply, len(data)

    def _tell(self, replies: list[tuple[Reply, int]]) -> None:
        if replies and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended first
                self._loop.call_soon_threadsafe(self._deliver, replies)

    def _look(self, now_s: float) -> None:
        """After the connection."""
        if not self._sockets.is_connected:
            self._miss(now_s)
            return
        if self._num_introduced != self._sockets.num_connections and not self._introduce(now_s):
            return
        self._away_s = None
        if now_s - self._asked_s >= (ASK_READY_S if self._is_ready else ASK_S):
            self._asked_s = now_s
            self._sockets.send(encode(GetStatus(tag=1)))
        self._outgoing.send_all(self._sockets.send, self._awaited.sent)

    def _miss(self, now_s: float) -> None:
        """There is no connection: once that has lasted, what was open is lost."""
        if self._away_s is None:
            self._away_s = now_s
        patience_s = 0.0 if self._sockets.is_ipc else AWAY_S
        if self._session and now_s - self._away_s >= patience_s:
            self._session, self._awaited = "", AwaitedRequests()
        if not self._session and self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._lose_all, self._sockets.refusal)

    def _introduce(self, now_s: float) -> bool:
        """Say first on each connection who we are, and what we wait for; whether that is done."""
        number = self._sockets.num_connections
        self._session = self._session or secrets.token_hex(16)
        if not self._sockets.send(encode(GetStatus(tag=1, session=self._session, awaited=self._awaited.all()))):
            return False
        if self._num_introduced >= 0 and self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._lose_asked)
        self._num_introduced, self._asked_s = number, now_s
        return True

    @property
    def _is_ready(self) -> bool:
        return self.status is not None and self.status.phase == "ready"

    def _withdraw(self) -> None:
        for request_id in self._awaited.ids:
            if not self._sockets.send(encode(Abort(request_id=request_id))):
                return


def _lost(request_id: str, why: str) -> Finished:
    """The last word on a request that the engine says none on."""
    return Finished(request_id=request_id, finish_reason="error", usage=Usage(), timing=RequestTiming(), error=why)


class Inbox:
    """What the engine said of one HTTP request's prompts and nobody took yet: bounded, in order, for one task.

    Belongs to the event loop. `is_stream`: wakes who waits for every token, otherwise at beginnings and ends alone.
    """

    def __init__(self, *, is_stream: bool) -> None:
        self.overflowed = False
        """More came than may wait: nothing is taken any more."""
        self._wakes_on_tokens = is_stream
        self._max_bytes = MAX_STREAM_BYTES if is_stream else MAX_WHOLE_BYTES
        self._waiting: deque[tuple[int, Said]] = deque()
        self._num_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    def put(self, prompt: int, reply: Said, num_bytes: int) -> None:
        """Append what was said of the prompt of this number."""
        if self.overflowed:
            return
        self._num_bytes += num_bytes + SAID_OVERHEAD_BYTES
        self._waiting.append((prompt, reply))
        if self._num_bytes > self._max_bytes:
            self.overflowed = True
            self._waiting.clear()
        if self.overflowed or self._wakes_on_tokens or not isinstance(reply, Tokens):
            self._wake()

    async def take(self) -> list[tuple[int, Said]]:
        """Everything that waits, oldest first, once there is something worth waking for."""
        while not self._waiting and not self.overflowed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        replies = list(self._waiting)
        self._waiting.clear()
        if self._wakes_on_tokens:
            self._num_bytes = 0  # what is kept of a whole answer goes on to count
        return replies

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
