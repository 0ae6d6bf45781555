"""Waiting requests in the order of service: by priority, then by client and batch in turn, then first come, first
served.

Among requests of one priority, the client whose running requests hold the fewest tokens is next; among that client's
batches (requests that it sent together: several prompts, or several completions of one), the batch whose running
requests hold the fewest; within a batch, and if these are equal, the request that came first. So a client or batch with
thousands of requests delays another client's single request by no more than one of its own requests. For one client
with batches of one request each, this is the order of arrival. A request counts with its tokens at its admission.

Owns the totals of what each client and batch runs. Adding, removing and finding the next request are O(log n) in the
number of waiting requests.
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
"""Client and the identifier of a batch."""


@dataclass(slots=True)
class Held:
    """Totals of the running requests of a client or a batch."""

    num_requests: int = 0
    num_tokens: int = 0
    num_spare: int = 0
    """Number of the client's batches with at least two running requests; 0 for a batch."""


class WaitingQueue:
    """Queue of waiting requests. `add_request` and `remove` change the queue, `start` and `stop` the running totals."""

    def __init__(self) -> None:
        self._num_waiting = 0
        self._clients: _Ranking[str] = _Ranking()
        self._batches: dict[str, _Ranking[_Batch]] = {}
        self._requests: dict[_Batch, _Ranking[Request]] = {}
        self._held: dict[str | _Batch, Held] = {}
        self.num_spare = 0
        """Number of clients with at least two running requests."""
        self._charged: dict[int, int] = {}
        """Tokens of each running request at its admission, by request number."""

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def first(self) -> Request:
        """Next request to be served. The queue must not be empty."""
        return self._requests[self._batches[self._clients.first].first].first

    def add_request(self, request: Request) -> None:
        """Enqueue a request. The request must not be queued already."""
        batch = batch_of(request)
        waiting = self._requests.setdefault(batch, _Ranking())
        assert request not in waiting, f"request {request.number} waits already"
        waiting.put(request, rank(request))
        self._num_waiting += 1
        self._place(batch)

    def remove(self, request: Request) -> None:
        batch = batch_of(request)
        waiting = self._requests.get(batch)
        assert waiting is not None, f"request {request.number} does not wait"
        assert request in waiting, f"request {request.number} does not wait"
        waiting.drop(request)
        self._num_waiting -= 1
        self._place(batch)

    def start(self, request: Request) -> None:
        """Record that a request runs: its tokens count to its client and batch until `stop`."""
        self._charged[request.number] = request.num_tokens
        self._charge(batch_of(request), 1, request.num_tokens)

    def stop(self, request: Request) -> None:
        """Record that a request no longer runs."""
        self._charge(batch_of(request), -1, -self._charged.pop(request.number))

    def held_by_client(self, request: Request) -> Held:
        """Totals of the running requests of the client of `request`. Callers must not change them."""
        return self._held.get(request.client, Held())

    def held_by_batch(self, request: Request) -> Held:
        """Totals of the running requests of the batch of `request`. Callers must not change them."""
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
        """Update the ranks of a batch and its client after a change of their waiting requests or running totals."""
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
    """Return the client and batch of a request. Without a batch, the completions of one prompt form one."""
    return request.client, request.batch or request.request_id


class _Ranking(Generic[_Thing]):
    """Priority queue whose keys may change.

    Removed and moved items leave stale heap entries, which are compacted in bulk.
    """

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
        """Item with the smallest key. The queue must not be empty."""
        return self._heap[0][2]

    def put(self, thing: _Thing, key: tuple[int, ...]) -> None:
        place = self._places.get(thing)
        if place is None or place[0] != key:
            place = self._places[thing] = (key, next(self._numbers), thing)
            heappush(self._heap, place)
            self._tidy()

    def drop(self, thing: _Thing) -> None:
        if self._places.pop(thing, None) is not None:
            self._tidy()

    def _tidy(self) -> None:
        """Restore the invariant that the first entry of the heap is not stale; compact the heap if it has too many
        stale ones.
        """
        if len(self._heap) > 2 * len(self._places) + 16:
            self._heap = list(self._places.values())
            heapify(self._heap)
        while self._heap and self._places.get(self._heap[0][2]) is not self._heap[0]:
            heappop(self._heap)
