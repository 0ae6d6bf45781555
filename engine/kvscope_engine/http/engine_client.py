"""Client of the engine: a thread for the command socket, and the routing of replies on the event loop.

Owns the connection across restarts of the engine, and every unfinished request. If the engine disappears, its requests
end with an error, and the client waits for it to return. Independent of HTTP.
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
from kvscope_telemetry.transport.client_sockets import NO_ENGINE, AwaitedRequests, ClientSockets, Outgoing
from kvscope_telemetry.transport.connections import key_for

EngineReply: TypeAlias = Accepted | Refused | Tokens | Finished

MAX_REPLIES: Final = 4_096
BATCHING_DELAY_S: Final = 0.001
"""Seconds to sleep before reading replies while several requests are in progress.

The replies of a complete step then arrive together, and the event loop is woken once for all of them.
"""
TICK_MS: Final = 250
MIN_QUERY_TAG: Final = 2
"""Minimum tag of a query from an endpoint. The client's thread uses lower tags for its own queries."""
READY_POLL_S: Final = 5.0
STARTING_POLL_S: Final = 0.25
RECONNECT_TIMEOUT_S: Final = 5.0
"""Seconds for which requests outlive a broken tcp connection. An ipc connection breaks only when the engine's process
ends.
"""
CONNECTION_LOST: Final = f"{NO_ENGINE}: its connection is lost"
LOST_TOKENS: Final = "the connection broke, and a part of the answer was not kept"
MAX_STREAM_BYTES: Final = 4 << 20
"""Maximum bytes queued for a client that reads slowly. If they are exceeded, the request ends."""
MAX_WHOLE_BYTES: Final = 64 << 20
REPLY_OVERHEAD_BYTES: Final = 200


@dataclass(slots=True)
class _OpenRequest:
    inbox: ReplyInbox
    prompt: int
    num_left: int
    abort: Abort


class EngineClient:
    """Connection to the engine at `endpoint`.

    All methods except `close` are called on the event loop. Raises BadInput for a bad endpoint or key file.
    """

    def __init__(self, endpoint: str, *, key: Path | None = None) -> None:
        self.status: Status | None = None
        """Latest status of the engine; None while disconnected."""
        self.status_received_s = 0.0
        self.refusal = ""
        self._endpoint = endpoint
        self._sockets = ClientSockets(endpoint, key=key_for(endpoint, key), subscribes=False)
        self._outgoing = Outgoing()
        self._open: dict[str, _OpenRequest] = {}
        self._pending_queries: dict[int, asyncio.Future[Reply]] = {}
        self._next_tag = MIN_QUERY_TAG
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvscope-engine-line", daemon=True)
        # Used by the thread only:
        self._awaited = AwaitedRequests()
        self._session = ""
        self._introduced_connection = -1
        self._polled_s = 0.0
        self._disconnected_s: float | None = 0.0

    def start(self) -> None:
        """Connect. Call it on the event loop that receives the replies."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the connection. Unfinished requests are aborted."""
        self._closing = True
        if self._thread.is_alive():
            self._sockets.wake()
            self._thread.join()
        else:
            self._sockets.close()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def submit(self, submit: Submit, inbox: ReplyInbox, prompt: int) -> None:
        """Send a submission. Its replies are pushed to `inbox` with the index `prompt`. Raises BadInput or
        EngineDead.
        """
        if self.status is None:
            raise EngineDead(NO_ENGINE)
        self._outgoing.put(submit)
        abort = Abort(request_id=submit.request_id, client=submit.client, batch=submit.batch)
        self._open[submit.request_id] = _OpenRequest(inbox, prompt, max(1, submit.sampling.n), abort)
        self._sockets.wake()

    async def ask(self, command: LoadAdapter | UnloadAdapter) -> Done | Failed:
        """Send a command and return the engine's reply, after refreshing `status`. Raises EngineDead if no engine is
        connected.
        """
        if self.status is None:
            raise EngineDead(NO_ENGINE)
        reply = await self._query(command)
        await self.refresh()
        assert isinstance(reply, Done | Failed), "these are answered so"
        return reply

    async def refresh(self) -> None:
        await self._query(GetStatus())

    async def _query(self, command: LoadAdapter | UnloadAdapter | GetStatus) -> Reply:
        tag = self._next_tag
        self._next_tag += 1
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._pending_queries[tag] = future
        try:
            self._outgoing.put(replace(command, tag=tag))
            self._sockets.wake()
            return await future
        finally:
            del self._pending_queries[tag]

    def abandon(self, request_id: str) -> None:
        """Abort request `request_id`, unless it has ended."""
        request = self._open.pop(request_id, None)
        if request is not None:
            self._abort(request.abort)

    def _abort(self, abort: Abort) -> None:
        with contextlib.suppress(EngineDead):  # then no engine runs it
            self._outgoing.put(abort)
            self._sockets.wake()

    # On the event loop, scheduled by the thread.

    def _deliver(self, replies: list[tuple[Reply, int]]) -> None:
        for reply, num_bytes in replies:
            if isinstance(reply, Status):
                self.status, self.status_received_s = reply, time.monotonic()
            elif isinstance(reply, Accepted | Refused | Tokens | Finished):
                self._route(reply, num_bytes)
            elif isinstance(reply, Failed) and reply.request_id:
                self._route(Refused(request_id=reply.request_id, reason=reply.reason), num_bytes)
            future = self._pending_queries.get(reply.tag) if isinstance(reply, Status | Done | Failed) else None
            if future is not None and not future.done():
                future.set_result(reply)

    def _route(self, reply: EngineReply, num_bytes: int) -> None:
        request = self._open.get(reply.request_id)
        if request is None:
            if isinstance(reply, Accepted):  # accepted after it was abandoned
                self._abort(Abort(request_id=reply.request_id))
            return
        if isinstance(reply, Tokens) and reply.num_missed:
            self.abandon(reply.request_id)
            reply = _error_reply(reply.request_id, LOST_TOKENS)
        elif isinstance(reply, Finished):
            request.num_left -= 1
            if not request.num_left:
                del self._open[reply.request_id]
        elif isinstance(reply, Refused):
            del self._open[reply.request_id]
        request.inbox.push(request.prompt, reply, num_bytes)

    def _fail_all(self, refusal: str) -> None:
        self.status, self.refusal = None, refusal
        lost_requests, self._open = self._open, {}
        for request_id, request in lost_requests.items():
            request.inbox.push(request.prompt, _error_reply(request_id, CONNECTION_LOST), 0)
        self._fail_queries()

    def _fail_queries(self) -> None:
        """Fail the pending queries, whose replies may have been sent on the broken connection."""
        for future in self._pending_queries.values():
            if not future.done():
                future.set_exception(EngineDead(CONNECTION_LOST))

    # On the thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._run_once()
        finally:
            self._abort_all()
            self._sockets.close()

    def _run_once(self) -> None:
        self._sockets.wait(TICK_MS)
        if len(self._open) > 1:
            time.sleep(BATCHING_DELAY_S)
        replies = [reply for data in self._sockets.receive_replies(MAX_REPLIES) if (reply := self._decode(data))]
        self._post(replies)
        self._maintain(time.monotonic())
        refusals: list[tuple[Reply, int]] = [(reply, 0) for reply in self._outgoing.expired(time.monotonic_ns())]
        self._post(refusals)

    def _decode(self, data: bytes) -> tuple[Reply, int] | None:
        try:
            reply = decode_reply(data)
        except ProtocolError:  # of a later version, or malformed: no request can be identified
            return None
        self._awaited.record_reply(reply)
        return reply, len(data)

    def _post(self, replies: list[tuple[Reply, int]]) -> None:
        if replies and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed before
                self._loop.call_soon_threadsafe(self._deliver, replies)

    def _maintain(self, now_s: float) -> None:
        if not self._sockets.is_connected:
            self._check_disconnected(now_s)
            return
        if self._introduced_connection != self._sockets.num_connections and not self._introduce(now_s):
            return
        self._disconnected_s = None
        if now_s - self._polled_s >= (READY_POLL_S if self._is_ready else STARTING_POLL_S):
            self._polled_s = now_s
            self._sockets.send(encode(GetStatus(tag=1)))
        self._outgoing.send_all(self._sockets.send, self._awaited.sent)

    def _check_disconnected(self, now_s: float) -> None:
        if self._disconnected_s is None:
            self._disconnected_s = now_s
        timeout_s = 0.0 if self._sockets.is_ipc else RECONNECT_TIMEOUT_S
        if self._session and now_s - self._disconnected_s >= timeout_s:
            self._session, self._awaited = "", AwaitedRequests()
        if not self._session and self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._fail_all, self._sockets.refusal)

    def _introduce(self, now_s: float) -> bool:
        """Send the session id and the ids of the requests that await replies, as the first message of each connection.
        Returns whether it was sent.
        """
        number = self._sockets.num_connections
        self._session = self._session or secrets.token_hex(16)
        if not self._sockets.send(encode(GetStatus(tag=1, session=self._session, awaited=self._awaited.all()))):
            return False
        if self._introduced_connection >= 0 and self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._fail_queries)
        self._introduced_connection, self._polled_s = number, now_s
        return True

    @property
    def _is_ready(self) -> bool:
        return self.status is not None and self.status.phase == "ready"

    def _abort_all(self) -> None:
        for request_id in self._awaited.ids:
            if not self._sockets.send(encode(Abort(request_id=request_id))):
                return


def _error_reply(request_id: str, why: str) -> Finished:
    return Finished(request_id=request_id, finish_reason="error", usage=Usage(), timing=RequestTiming(), error=why)


class ReplyInbox:
    """Bounded queue of the replies to one HTTP request's prompts, read by one task on the event loop.

    `is_stream`: whether to wake the reader for every token, not only when a prompt is accepted or refused or ends.
    """

    def __init__(self, *, is_stream: bool) -> None:
        self.overflowed = False
        """Whether the size limit was exceeded, after which further replies are dropped."""
        self._wakes_on_tokens = is_stream
        self._max_bytes = MAX_STREAM_BYTES if is_stream else MAX_WHOLE_BYTES
        self._waiting: deque[tuple[int, EngineReply]] = deque()
        self._num_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    def push(self, prompt: int, reply: EngineReply, num_bytes: int) -> None:
        if self.overflowed:
            return
        self._num_bytes += num_bytes + REPLY_OVERHEAD_BYTES
        self._waiting.append((prompt, reply))
        if self._num_bytes > self._max_bytes:
            self.overflowed = True
            self._waiting.clear()
        if self.overflowed or self._wakes_on_tokens or not isinstance(reply, Tokens):
            self._wake()

    async def pop_all(self) -> list[tuple[int, EngineReply]]:
        while not self._waiting and not self.overflowed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        replies = list(self._waiting)
        self._waiting.clear()
        if self._wakes_on_tokens:
            self._num_bytes = 0  # a whole answer is still held by the reader, so its bytes keep counting
        return replies

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
