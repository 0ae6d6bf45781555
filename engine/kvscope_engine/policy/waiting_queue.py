"""Requests that wait, in the order of service: by priority, then clients in turn, then first come, first served.

Among requests of one priority it is the turn of the client whose running requests hold the fewest tokens; among that
client's batches (what it asked for at once: several prompts, several completions of one) of the batch that holds the
fewest; in a batch, and among equals, of who came first. So a client, or a batch, with thousands of requests delays
somebody else's single one by no more than its own. Of one client with batches of one request each this is the order in
which they came. Tokens count as many as they were when their request was let in.

Owns what each client and batch runs. Coming, going and being next are O(log n), however many wait.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeAlias, TypeVar

from kvscope_engine.policy.ranked_queue import rank
from kvscope_engine.policy.request import Request

_Thing = TypeVar("_Thing", bound=Hashable)
_Batch: TypeAlias = tuple[str, str]
"""A client, and what it asked for at once."""


@dataclass(slots=True)
class Held:
    """What somebody's running requests are."""

    num_requests: int = 0
    num_tokens: int = 0
    num_spare: int = 0
    """Of a client: its batches that run several requests."""


class WaitingQueue:
    """`start` and `stop` say who runs, `add_request` and `remove` who waits."""

    def __init__(self) -> None:
        self._num_waiting = 0
        self._clients: _Ranking[str] = _Ranking()
        self._batches: dict[str, _Ranking[_Batch]] = {}
        self._requests: dict[_Batch, _Ranking[Request]] = {}
        self._held: dict[str | _Batch, Held] = {}
        self.num_spare = 0
        """Clients that run several requests."""
        self._charged: dict[int, int] = {}
        """Tokens of each running request when it was let in."""

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def first(self) -> Request:
        """The next to be served. There must be one."""
        return self._requests[self._batches[self._clients.first].first].first

    def add_request(self, request: Request) -> None:
        """Put a request in its place. It must not be here."""
        batch = batch_of(request)
        waiting = self._requests.setdefault(batch, _Ranking())
        assert request not in waiting, f"request {request.number} waits already"
        waiting.put(request, rank(request))
        self._num_waiting += 1
        self._place(batch)

    def remove(self, request: Request) -> None:
        """Take out a request that is here."""
        batch = batch_of(request)
        waiting = self._requests.get(batch)
        assert waiting is not None, f"request {request.number} does not wait"
        assert request in waiting, f"request {request.number} does not wait"
        waiting.drop(request)
        self._num_waiting -= 1
        self._place(batch)

    def start(self, request: Request) -> None:
        """It runs: from here on its client and batch hold its tokens."""
        self._charged[request.number] = request.num_tokens
        self._charge(batch_of(request), 1, request.num_tokens)

    def stop(self, request: Request) -> None:
        """It runs no more."""
        self._charge(batch_of(request), -1, -self._charged.pop(request.number))

    def held_by_client(self, request: Request) -> Held:
        """What the client of `request` runs. Not to be changed."""
        return self._held.get(request.client, Held())

    def held_by_batch(self, request: Request) -> Held:
        """What the batch of `request` runs. Not to be changed."""
        return self._held.get(batch_of(request), Held())

    def _charge(self, batch: _Batch, num_requests: int, num_tokens: int) -> None:
        of_client, of_batch = (self._held.setdefault(holder, Held()) for holder in (batch[0], batch))
        self.num_spare -= of_client.num_requests > 1
        of_client.num_spare -= of_batch.num_requests > 1
        for held in (of_client, of_batch):
            held.num_requests += num_requests
            held.num_tokens += num_tokens
        of_client.num_spare += of_batch.num_requests > 1
        self.num_spare += of_client.num_requests > 1
        for holder in (batch[0], batch):
            if not self._held[holder].num_requests:
                del self._held[holder]
        self._place(batch)

    def _place(self, batch: _Batch) -> None:
        """Who waits in the batch, or what it or its client holds, has changed: put both where they belong."""
        client = batch[0]
        batches = self._batches.get(client)
        waiting = self._requests.get(batch)
        if waiting is not None:
            batches = self._batches.setdefault(client, _Ranking())
            if waiting:
                batches.put(batch, self._key(batch, waiting.first))
            else:
                batches.drop(batch)
                del self._requests[batch]
        if batches:
            self._clients.put(client, self._key(client, self._requests[batches.first].first))
        elif batches is not None:
            self._clients.drop(client)
            del self._batches[client]

    def _key(self, holder: str | _Batch, first: Request) -> tuple[int, int, int, int]:
        held = self._held.get(holder)
        below, arrival_ns, number = rank(first)
        return below, 0 if held is None else held.num_tokens, arrival_ns, number


def batch_of(request: Request) -> _Batch:
    """The batch that a request counts to: the completions of one prompt are one where nobody says more."""
    return request.client, request.batch or request.request_id


class _Ranking(Generic[_Thing]):
    """Things by a key that may change. Who leaves or moves keeps a place that no longer counts, until too many do."""

    __slots__ = ("_heap", "_numbers", "_places")

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], int, _Thing]] = []
        self._places: dict[_Thing, tuple[tuple[int, ...], int, _Thing]] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, thing: _Thing) -> bool:
        return thing in self._places

    @property
    def first(self) -> _Thing:
        """That of the smallest key. There must be one."""
        return self._heap[0][2]

    def put(self, thing: _Thing, key: tuple[int, ...]) -> None:
        """Here, by this key from now on."""
        place = self._places.get(thing)
        if place is None or place[0] != key:
            place = self._places[thing] = (key, next(self._numbers), thing)
            heappush(self._heap, place)
            self._tidy()

    def drop(self, thing: _Thing) -> None:
        """No longer here; nothing happens when it is not."""
        if self._places.pop(thing, None) is not None:
            self._tidy()

    def _tidy(self) -> None:
        """The first in the heap is one that counts."""
        if len(self._heap) > 2 * len(self._places) + 16:
            self._heap = list(self._places.values())
            heapify(self._heap)
        while self._heap and self._places.get(self._heap[0][2]) is not self._heap[0]:
            heappop(self._heap)
