"""Clients that come back: which connection a session has now, and what was said on it lately.

A session is a client's own secret. While its connection is away its requests go on for `AWAY_S`, and what is
said of them is kept, bounded; presented again, it gets what it has not heard. Knows neither the engine nor
sockets. Belongs to the engine's thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from kvscope_telemetry.messages.commands import Accepted, Awaited, Finished, Refused, RequestTiming, Tokens, Usage

AWAY_S: Final = 30.0
"""How long the requests of a client that is away go on."""
FORGET_S: Final = 600.0
"""How long a session without a connection is remembered."""
MAX_SESSIONS: Final = 1024
MAX_KEPT_BYTES: Final = 2 << 20
"""Of what was said on one session: some 10,000 tokens."""
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
    """Which `Tokens` of its completion this is, from 0."""


@dataclass(slots=True)
class ClientSession:
    """One client over its connections."""

    token: str
    owner: str
    """The name of the key it came with."""
    client: bytes
    kept: deque[_Kept] = field(default_factory=deque)
    num_bytes: int = 0
    counts: dict[tuple[str, int], int] = field(default_factory=dict)
    """`Tokens` said so far, for each completion that has not ended."""
    away_since_s: float | None = None
    is_given_up: bool = False
    """It was away for too long: its requests are being aborted."""


class ClientSessions:
    """All of them, by token and by the connection each has or had last."""

    def __init__(self) -> None:
        self._by_token: dict[str, ClientSession] = {}
        self._by_client: dict[bytes, ClientSession] = {}
        self._num_bytes = 0

    @property
    def any_away(self) -> bool:
        """Whether a session waits for its client."""
        return any(s.away_since_s is not None and not s.is_given_up for s in self._by_client.values())

    def join(self, client: bytes, token: str, owner: str) -> bytes | None:
        """`client` says that it is this session; its connection before, None for a new one.

        A token that came with another key is not believed: it begins a session of its own.
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
        """Keep what is said to a client; whether it is there to hear it."""
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
        """A connection is gone; whether its client may come back."""
        session = self._by_client.get(client)
        if session is None:
            return False
        if session.away_since_s is None:
            session.away_since_s = time.monotonic()
        return True

    def expired(self) -> list[bytes]:
        """Connections whose clients were away for too long; each is told once."""
        now_s = time.monotonic()
        gone = [s for s in self._by_client.values() if not s.is_given_up and _away_s(s, now_s) > AWAY_S]
        for session in gone:
            session.is_given_up = True
        return [session.client for session in gone]

    def unheard(self, client: bytes, awaited: Iterable[Awaited]) -> list[Said]:
        """What was said about these requests that their client has not heard, in the order it was said.

        Of each request it has all that is kept; where some is not, `num_missed` of the next tokens says how many
        came before. A request that nothing is known of gets its last word here.
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
        """Drop what is kept for those who have nothing open: it was heard, or can be done without."""
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
