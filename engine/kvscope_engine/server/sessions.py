"""Clients' sessions and open requests: which client each request belongs to, and which replies a returning client
missed.

A session is identified by a secret token of the client. While the client is disconnected, its requests continue for
`AWAY_S`, and replies are retained up to a bound. When the client presents the token again, the missed replies are
resent. Independent of the engine and of sockets. Used only on the engine's thread.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from kvscope_engine.server.service_limits import Allowance, ServiceLimits
from kvscope_telemetry.messages.command_size import COMMAND_BYTES, NUMBER_BYTES, sampling_bytes
from kvscope_telemetry.messages.commands import (
    Accepted,
    Awaited,
    Finished,
    FinishReason,
    Refused,
    RequestTiming,
    Submit,
    Tokens,
    Usage,
)

AWAY_S: Final = 30.0
"""Seconds for which the requests of a disconnected client continue."""
SESSION_TTL_S: Final = 600.0
"""Seconds after which a session without a connection is deleted."""
MAX_SESSIONS: Final = 1024
MAX_RETAINED_BYTES: Final = 2 << 20
"""Maximum bytes of retained replies per session, enough for about 10,000 tokens."""
MAX_TOTAL_RETAINED_BYTES: Final = 64 << 20
DROPPED: Final = "the connection was lost for too long: the engine dropped this request"
NEVER_RECEIVED: Final = "the connection was lost before the engine received this request"
ENDED: Final = -1

SessionReply: TypeAlias = Accepted | Refused | Tokens | Finished


@dataclass(slots=True)
class _RetainedReply:
    reply: SessionReply
    num_bytes: int
    number: int = 0
    """Index of this `Tokens` reply in its completion, from 0."""


@dataclass(slots=True)
class ClientSession:
    token: str
    owner: str
    """Public key with which the session was opened."""
    client: bytes
    replies: deque[_RetainedReply] = field(default_factory=deque)
    num_bytes: int = 0
    counts: dict[tuple[str, int], int] = field(default_factory=dict)
    """Number of `Tokens` replies so far of each unfinished completion (request id, index)."""
    away_since_s: float | None = None
    is_expired: bool = False
    """Whether the client was disconnected for longer than `AWAY_S`, so that its requests are being aborted."""


class ClientSessions:
    def __init__(self) -> None:
        self._by_token: dict[str, ClientSession] = {}
        self._by_client: dict[bytes, ClientSession] = {}
        self._num_bytes = 0

    @property
    def any_away(self) -> bool:
        return any(s.away_since_s is not None and not s.is_expired for s in self._by_client.values())

    def connect(self, client: bytes, token: str, owner: str) -> bytes | None:
        """Connect `client` to the session of `token`. Returns the session's previous connection, or None for a new
        session.

        A token presented with another key than before is not trusted and begins a new session.
        """
        self._drop_expired()
        session = self._by_token.get(token)
        if session is None or session.owner != owner:
            self._evict_sessions()
            self._by_token[token] = self._by_client[client] = ClientSession(token, owner, client)
            return None
        previous, session.client = session.client, client
        session.away_since_s, session.is_expired = None, False
        self._by_client.pop(previous, None)
        self._by_client[client] = session
        return previous

    def retain(self, client: bytes, reply: SessionReply) -> bool:
        """Retain a reply to a client. Returns whether the client is connected."""
        session = self._by_client.get(client)
        if session is None:
            return True
        retained = _retained(session, reply)
        session.replies.append(retained)
        self._count_bytes(session, retained.num_bytes)
        if self._num_bytes > MAX_TOTAL_RETAINED_BYTES:
            self._drop_received()
        while session.num_bytes > MAX_RETAINED_BYTES or (
            self._num_bytes > MAX_TOTAL_RETAINED_BYTES and session.replies
        ):
            self._count_bytes(session, -session.replies.popleft().num_bytes)
        return session.away_since_s is None

    def mark_away(self, client: bytes) -> bool:
        """Record that a client's connection was closed. Returns whether the client has a session to which it
        may reconnect.
        """
        session = self._by_client.get(client)
        if session is None:
            return False
        if session.away_since_s is None:
            session.away_since_s = time.monotonic()
        return True

    def expired(self) -> list[bytes]:
        """Return the connections of clients that have been disconnected for longer than `AWAY_S`. Each
        connection is returned only once.
        """
        now_s = time.monotonic()
        expired = [
            session
            for session in self._by_client.values()
            if not session.is_expired and _away_s(session, now_s) > AWAY_S
        ]
        for session in expired:
            session.is_expired = True
        return [session.client for session in expired]

    def missed_replies(self, client: bytes, awaited: Iterable[Awaited]) -> list[SessionReply]:
        """Return the replies to the requests `awaited` that the client has not received, in order.

        If some are no longer retained, `num_missed` of the next `Tokens` is the number of replies missing before it. A
        request that the session does not know is answered with an error: `Refused` if the client has received nothing
        about the request, otherwise a `Finished` message for each of its completions that the client still awaits.
        """
        session = self._by_client.get(client)
        awaited_by_id = {awaited_request.request_id: awaited_request for awaited_request in awaited}
        known_ids: set[str] = set()
        replies: list[SessionReply] = []
        counted: set[tuple[str, int]] = set()
        for retained in session.replies if session is not None else ():
            awaited_request = awaited_by_id.get(retained.reply.request_id)
            if awaited_request is not None:
                known_ids.add(awaited_request.request_id)
                replies += _replies_if_missed(awaited_request, retained, counted)
        open_ids = {request_id for request_id, _ in session.counts} if session is not None else set()
        for request_id in awaited_by_id.keys() - known_ids - open_ids:
            replies += _final_messages(awaited_by_id[request_id])
        return replies

    def _evict_sessions(self) -> None:
        if len(self._by_token) >= MAX_SESSIONS:
            idle = [s for s in self._by_token.values() if s.away_since_s is not None or not s.counts]
            for session in (idle or list(self._by_token.values()))[: MAX_SESSIONS // 8]:
                self._remove(session)

    def _drop_expired(self) -> None:
        now_s = time.monotonic()
        for session in [s for s in self._by_token.values() if _away_s(s, now_s) > SESSION_TTL_S]:
            self._remove(session)

    def _drop_received(self) -> None:
        """Drop the retained replies of all sessions whose requests have ended. Most of these replies have been
        received.
        """
        for session in self._by_token.values():
            if not session.counts:
                session.replies.clear()
                self._count_bytes(session, -session.num_bytes)

    def _remove(self, session: ClientSession) -> None:
        self._count_bytes(session, -session.num_bytes)
        self._by_token.pop(session.token, None)
        if self._by_client.get(session.client) is session:
            del self._by_client[session.client]

    def _count_bytes(self, session: ClientSession, num_bytes: int) -> None:
        session.num_bytes += num_bytes
        self._num_bytes += num_bytes


def _retained(session: ClientSession, reply: SessionReply) -> _RetainedReply:
    if isinstance(reply, Accepted):
        session.counts.update(((reply.request_id, index), 0) for index in range(len(reply.numbers)))
        return _RetainedReply(reply, 200)
    if isinstance(reply, Refused):
        return _RetainedReply(reply, 200 + len(reply.reason))
    key = (reply.request_id, reply.index)
    if isinstance(reply, Finished):
        session.counts.pop(key, None)
        texts = (reply.error, reply.content or "", *(call.arguments for call in reply.tool_calls))
        return _RetainedReply(reply, 400 + 4 * sum(map(len, texts)))
    number = session.counts.get(key, 0)
    session.counts[key] = number + 1
    logprobs = sum(100 + 100 * len(position.top) for position in (*reply.logprobs, *reply.prompt_logprobs))
    return _RetainedReply(reply, 300 + 4 * len(reply.text) + 40 * len(reply.token_ids) + logprobs, number)


def _replies_if_missed(
    awaited_request: Awaited, retained: _RetainedReply, counted: set[tuple[str, int]]
) -> Iterator[SessionReply]:
    reply = retained.reply
    if isinstance(reply, Accepted | Refused):
        if not awaited_request.heard:
            yield reply
        return
    num_received = awaited_request.heard[reply.index] if reply.index < len(awaited_request.heard) else 0
    if num_received == ENDED:
        return
    if isinstance(reply, Finished):
        yield reply
        return
    key = (reply.request_id, reply.index)
    missed = 0 if key in counted else max(0, retained.number - num_received)
    counted.add(key)
    if retained.number >= num_received:
        yield msgspec.structs.replace(reply, num_missed=missed) if missed else reply


def _final_messages(awaited_request: Awaited) -> Iterator[SessionReply]:
    if not awaited_request.heard:
        yield Refused(request_id=awaited_request.request_id, reason=NEVER_RECEIVED)
    for index, num_received in enumerate(awaited_request.heard):
        if num_received != ENDED:
            yield Finished(
                request_id=awaited_request.request_id,
                index=index,
                finish_reason="error",
                usage=Usage(),
                timing=RequestTiming(),
                error=DROPPED,
            )


def _away_s(session: ClientSession, now_s: float) -> float:
    return 0.0 if session.away_since_s is None else now_s - session.away_since_s


@dataclass(slots=True)
class OpenRequest:
    client: bytes
    on_behalf_of: str
    """Name of the user for whom the client acts, as in `Submit.client`; "" if the client acts for itself."""
    request_id: str
    num_prompt_tokens: int
    num_tokens: dict[int, int]
    """Number of tokens sent so far for each unfinished completion, by the completion's index."""
    num_bytes: int = 0
    count: int = 1
    arrival_ns: int = field(default_factory=time.monotonic_ns)

    def final_messages(self, reason: FinishReason, error: str, only: int | None = None) -> list[Finished]:
        """Return a `Finished` message for each unfinished completion, or for completion `only`, for use when the engine
        cannot send them.
        """
        total_s = (time.monotonic_ns() - self.arrival_ns) / 1e9
        return [
            Finished(
                request_id=self.request_id,
                index=index,
                finish_reason=reason,
                usage=Usage(prompt_tokens=self.num_prompt_tokens, completion_tokens=count),
                timing=RequestTiming(total_s=total_s),
                error=error,
            )
            for index, count in self.num_tokens.items()
            if only in (None, index)
        ]


class OpenRequests:
    """All open requests by id, and their counts by client. An id can be used again once its last completion has
    finished.
    """

    def __init__(self, limits: ServiceLimits | None = None) -> None:
        limits = limits or ServiceLimits()
        self._requests: dict[str, OpenRequest] = {}
        self._ids_by_client: dict[bytes, dict[str, None]] = {}
        self._allowance = Allowance("requests are open", limits.client_requests, limits.all_requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def refusal(self, client: bytes, submit: Submit, num_prompt_tokens: int) -> str:
        """Return the reason why the client may not open another request with `submit`; "" if it may."""
        return self._allowance.refusal(
            (client, submit.client), _num_bytes(submit, num_prompt_tokens), submit.sampling.n
        )

    def register(self, client: bytes, submit: Submit, accepted: Accepted) -> None:
        completions = dict.fromkeys(range(len(accepted.numbers)), 0)
        num_bytes = _num_bytes(submit, accepted.num_prompt_tokens)
        request = OpenRequest(
            client,
            submit.client,
            submit.request_id,
            accepted.num_prompt_tokens,
            completions,
            num_bytes,
            submit.sampling.n,
        )
        self._allowance.acquire((client, submit.client), num_bytes, submit.sampling.n)
        self._requests[submit.request_id] = request
        self._ids_by_client.setdefault(client, {})[submit.request_id] = None

    def client_of(self, output: Tokens | Finished) -> bytes | None:
        """Return the client whose request produced `output`; None if the request is not open. A `Finished`
        output removes its completion.
        """
        request = self._requests.get(output.request_id)
        if request is None or output.index not in request.num_tokens:
            return None
        if isinstance(output, Tokens):
            request.num_tokens[output.index] += len(output.token_ids)
            return request.client
        del request.num_tokens[output.index]
        if not request.num_tokens:
            self._remove(request)
        return request.client

    def belongs_to(self, request_id: str, client: bytes) -> bool:
        request = self._requests.get(request_id)
        return request is not None and request.client == client

    def move(self, previous: bytes, client: bytes) -> None:
        ids = self._ids_by_client.pop(previous, {})
        for request_id in ids:
            self._requests[request_id].client = client
        for on_behalf_of in {self._requests[request_id].on_behalf_of for request_id in ids}:
            self._allowance.move((previous, on_behalf_of), (client, on_behalf_of))
        if ids:
            self._ids_by_client[client] = ids | self._ids_by_client.get(client, {})

    def ids_of(self, client: bytes) -> list[str]:
        return list(self._ids_by_client.get(client, ()))

    def ids(self) -> list[str]:
        return list(self._requests)

    def end_one(self, request_id: str, reason: FinishReason, index: int | None = None) -> list[tuple[bytes, Finished]]:
        """Close a request, or only its completion `index`. Returns the `Finished` messages, each with the client; empty
        if the request is not open.
        """
        request = self._requests.get(request_id)
        messages = [] if request is None else request.final_messages(reason, "", index)
        return [(client, message) for message in messages if (client := self.client_of(message)) is not None]

    def end_all(self, reason: FinishReason, error: str = "") -> list[tuple[bytes, Finished]]:
        requests = list(self._requests.values())
        for request in requests:
            self._remove(request)
        return [(request.client, message) for request in requests for message in request.final_messages(reason, error)]

    def _remove(self, request: OpenRequest) -> None:
        del self._requests[request.request_id]
        self._allowance.release((request.client, request.on_behalf_of), request.num_bytes, request.count)
        ids = self._ids_by_client[request.client]
        del ids[request.request_id]
        if not ids:
            del self._ids_by_client[request.client]


def _num_bytes(submit: Submit, num_prompt_tokens: int) -> int:
    other_bytes = sys.getsizeof(submit.request_id) + sampling_bytes(submit.sampling)
    return COMMAND_BYTES + NUMBER_BYTES * num_prompt_tokens + other_bytes
