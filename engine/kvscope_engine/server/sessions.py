"""Clients' sessions and open requests: which client each request belongs to, and what a returning client has missed.

A session is identified by a secret token of the client. While its connection is away, its requests continue for
`AWAY_S`, and replies are retained up to a bound; when the token is presented again, the missed replies are resent.
Knows neither engine nor sockets. Used on the engine's thread only.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from kvscope_engine.server.limits import Allowance, ServiceLimits
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
"""Seconds for which the requests of a client that is away continue."""
FORGET_S: Final = 600.0
"""Seconds for which a session without a connection is remembered."""
MAX_SESSIONS: Final = 1024
MAX_KEPT_BYTES: Final = 2 << 20
"""Maximum bytes of retained replies of one session: some 10,000 tokens."""
MAX_ALL_KEPT_BYTES: Final = 64 << 20
FORGOTTEN: Final = "the connection was lost for too long: the engine dropped this request"
NEVER_CAME: Final = "the connection was lost before the engine received this request"
ENDED: Final = -1

Said: TypeAlias = Accepted | Refused | Tokens | Finished


@dataclass(slots=True)
class _Kept:
    reply: Said
    num_bytes: int
    number: int = 0
    """Index of this `Tokens` reply in its completion, from 0."""


@dataclass(slots=True)
class ClientSession:
    """One client across its connections."""

    token: str
    owner: str
    """Public key with which the session was opened."""
    client: bytes
    kept: deque[_Kept] = field(default_factory=deque)
    num_bytes: int = 0
    counts: dict[tuple[str, int], int] = field(default_factory=dict)
    """Number of `Tokens` replies so far of each completion (request id, index) that has not ended."""
    away_since_s: float | None = None
    is_given_up: bool = False
    """Whether it was away for too long: its requests are being aborted."""


class ClientSessions:
    """All sessions, by token and by current or last connection."""

    def __init__(self) -> None:
        self._by_token: dict[str, ClientSession] = {}
        self._by_client: dict[bytes, ClientSession] = {}
        self._num_bytes = 0

    @property
    def any_away(self) -> bool:
        """Whether a session is without a connection and may still return."""
        return any(s.away_since_s is not None and not s.is_given_up for s in self._by_client.values())

    def join(self, client: bytes, token: str, owner: str) -> bytes | None:
        """Connect `client` to the session of `token`. Returns its previous connection, or None for a new session.

        A token presented with another key than before is not trusted and begins a new session.
        """
        self._forget_old()
        session = self._by_token.get(token)
        if session is None or session.owner != owner:
            self._make_room()
            self._by_token[token] = self._by_client[client] = ClientSession(token, owner, client)
            return None
        before, session.client = session.client, client
        session.away_since_s, session.is_given_up = None, False
        self._by_client.pop(before, None)
        self._by_client[client] = session
        return before

    def note(self, client: bytes, reply: Said) -> bool:
        """Retain a reply to a client. Returns whether the client is connected."""
        session = self._by_client.get(client)
        if session is None:
            return True
        kept = _kept(session, reply)
        session.kept.append(kept)
        self._add(session, kept.num_bytes)
        if self._num_bytes > MAX_ALL_KEPT_BYTES:
            self._shed()
        while session.num_bytes > MAX_KEPT_BYTES or (self._num_bytes > MAX_ALL_KEPT_BYTES and session.kept):
            self._add(session, -session.kept.popleft().num_bytes)
        return session.away_since_s is None

    def leave(self, client: bytes) -> bool:
        """Report a closed connection. Returns whether its client may return."""
        session = self._by_client.get(client)
        if session is None:
            return False
        if session.away_since_s is None:
            session.away_since_s = time.monotonic()
        return True

    def expired(self) -> list[bytes]:
        """Return the connections of clients that have been away for longer than `AWAY_S`, each once."""
        now_s = time.monotonic()
        gone = [s for s in self._by_client.values() if not s.is_given_up and _away_s(s, now_s) > AWAY_S]
        for session in gone:
            session.is_given_up = True
        return [session.client for session in gone]

    def unheard(self, client: bytes, awaited: Iterable[Awaited]) -> list[Said]:
        """Return the replies about these requests that their client has not received, in order.

        If some are no longer retained, `num_missed` of the next `Tokens` is the number of replies missing before it. An
        unknown request is answered with its last message.
        """
        session = self._by_client.get(client)
        wanted = {one.request_id: one for one in awaited}
        known: set[str] = set()
        said: list[Said] = []
        met: set[tuple[str, int]] = set()
        for kept in session.kept if session is not None else ():
            one = wanted.get(kept.reply.request_id)
            if one is not None:
                known.add(one.request_id)
                said += _if_unheard(one, kept, met)
        open_ids = {request_id for request_id, _ in session.counts} if session is not None else set()
        for request_id in wanted.keys() - known - open_ids:
            said += _last_words(wanted[request_id])
        return said

    def _make_room(self) -> None:
        if len(self._by_token) >= MAX_SESSIONS:
            idle = [s for s in self._by_token.values() if s.away_since_s is not None or not s.counts]
            for session in (idle or list(self._by_token.values()))[: MAX_SESSIONS // 8]:
                self._forget(session)

    def _forget_old(self) -> None:
        now_s = time.monotonic()
        for session in [s for s in self._by_token.values() if _away_s(s, now_s) > FORGET_S]:
            self._forget(session)

    def _shed(self) -> None:
        """Drop the replies of sessions without open requests: they were received, or can be spared."""
        for session in self._by_token.values():
            if not session.counts:
                session.kept.clear()
                self._add(session, -session.num_bytes)

    def _forget(self, session: ClientSession) -> None:
        self._add(session, -session.num_bytes)
        self._by_token.pop(session.token, None)
        if self._by_client.get(session.client) is session:
            del self._by_client[session.client]

    def _add(self, session: ClientSession, num_bytes: int) -> None:
        session.num_bytes += num_bytes
        self._num_bytes += num_bytes


def _kept(session: ClientSession, reply: Said) -> _Kept:
    if isinstance(reply, Accepted):
        session.counts.update(((reply.request_id, index), 0) for index in range(len(reply.numbers)))
        return _Kept(reply, 200)
    if isinstance(reply, Refused):
        return _Kept(reply, 200 + len(reply.reason))
    key = (reply.request_id, reply.index)
    if isinstance(reply, Finished):
        session.counts.pop(key, None)
        return _Kept(reply, 400 + len(reply.error))
    number = session.counts.get(key, 0)
    session.counts[key] = number + 1
    logprobs = sum(100 + 100 * len(position.top) for position in reply.logprobs)
    return _Kept(reply, 300 + 4 * len(reply.text) + 40 * len(reply.token_ids) + logprobs, number)


def _if_unheard(one: Awaited, kept: _Kept, met: set[tuple[str, int]]) -> Iterator[Said]:
    reply = kept.reply
    if isinstance(reply, Accepted | Refused):
        if not one.heard:
            yield reply
        return
    heard = one.heard[reply.index] if reply.index < len(one.heard) else 0
    if heard == ENDED:
        return
    if isinstance(reply, Finished):
        yield reply
        return
    key = (reply.request_id, reply.index)
    missed = 0 if key in met else max(0, kept.number - heard)
    met.add(key)
    if kept.number >= heard:
        yield msgspec.structs.replace(reply, num_missed=missed) if missed else reply


def _last_words(one: Awaited) -> Iterator[Said]:
    if not one.heard:
        yield Refused(request_id=one.request_id, reason=NEVER_CAME)
    for index, heard in enumerate(one.heard):
        if heard != ENDED:
            yield Finished(
                request_id=one.request_id,
                index=index,
                finish_reason="error",
                usage=Usage(),
                timing=RequestTiming(),
                error=FORGOTTEN,
            )


def _away_s(session: ClientSession, now_s: float) -> float:
    return 0.0 if session.away_since_s is None else now_s - session.away_since_s


@dataclass(slots=True)
class OpenRequest:
    """An accepted request with completions that have not ended."""

    client: bytes
    whose: str
    """On whose behalf the client asked, as in `Submit.client`."""
    request_id: str
    num_prompt_tokens: int
    num_tokens: dict[int, int]
    """Number of tokens so far of each completion that has not ended."""
    num_bytes: int = 0
    count: int = 1
    """Number of completions counted against its client's allowance."""
    arrival_ns: int = field(default_factory=time.monotonic_ns)

    def ended(self, reason: FinishReason, error: str) -> list[Finished]:
        """Return the last message of each completion, for when the engine cannot send them."""
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
        ]


class OpenRequests:
    """All open requests by id, and how many each client has. An id is free once its last completion has ended."""

    def __init__(self, limits: ServiceLimits | None = None) -> None:
        limits = limits or ServiceLimits()
        self._requests: dict[str, OpenRequest] = {}
        self._of_client: dict[bytes, dict[str, None]] = {}
        self._allowance = Allowance("requests are open", limits.client_requests, limits.all_requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def refusal(self, client: bytes, submit: Submit, num_prompt_tokens: int) -> str:
        """Return the reason why the client may not open this request as well; an empty string if it may."""
        return self._allowance.refusal(
            (client, submit.client), _num_bytes(submit, num_prompt_tokens), submit.sampling.n
        )

    def open(self, client: bytes, submit: Submit, accepted: Accepted) -> None:
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
        self._allowance.take((client, submit.client), num_bytes, submit.sampling.n)
        self._requests[submit.request_id] = request
        self._of_client.setdefault(client, {})[submit.request_id] = None

    def owner(self, output: Tokens | Finished) -> bytes | None:
        """Return the client of an output, or None if it has none. `Finished` removes its completion."""
        request = self._requests.get(output.request_id)
        if request is None or output.index not in request.num_tokens:
            return None
        if isinstance(output, Tokens):
            request.num_tokens[output.index] += len(output.token_ids)
            return request.client
        del request.num_tokens[output.index]
        if not request.num_tokens:
            self._forget(request)
        return request.client

    def belongs_to(self, request_id: str, client: bytes) -> bool:
        request = self._requests.get(request_id)
        return request is not None and request.client == client

    def move(self, before: bytes, client: bytes) -> None:
        """Move a client's requests to its new connection."""
        ids = self._of_client.pop(before, {})
        for request_id in ids:
            self._requests[request_id].client = client
        for whose in {self._requests[request_id].whose for request_id in ids}:
            self._allowance.move((before, whose), (client, whose))
        if ids:
            self._of_client[client] = ids | self._of_client.get(client, {})

    def of(self, client: bytes) -> list[str]:
        """Return the request ids of the client."""
        return list(self._of_client.get(client, ()))

    def ids(self) -> list[str]:
        return list(self._requests)

    def end_one(self, request_id: str, reason: FinishReason) -> list[tuple[bytes, Finished]]:
        """Close a request. Returns its clients and last messages; empty if it is not open."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        self._forget(request)
        return [(request.client, last) for last in request.ended(reason, "")]

    def end_all(self, reason: FinishReason, error: str = "") -> list[tuple[bytes, Finished]]:
        """Close all requests. Returns their clients and last messages."""
        requests = list(self._requests.values())
        for request in requests:
            self._forget(request)
        return [(r.client, last) for r in requests for last in r.ended(reason, error)]

    def _forget(self, request: OpenRequest) -> None:
        del self._requests[request.request_id]
        self._allowance.give((request.client, request.whose), request.num_bytes, request.count)
        ids = self._of_client[request.client]
        del ids[request.request_id]
        if not ids:
            del self._of_client[request.client]


def _num_bytes(submit: Submit, num_prompt_tokens: int) -> int:
    """Bytes held for an open request: the tokens of its prompt, its id and its sampling parameters."""
    beside = sys.getsizeof(submit.request_id) + sampling_bytes(submit.sampling)
    return COMMAND_BYTES + NUMBER_BYTES * num_prompt_tokens + beside
