"""Waiting requests in scheduling order: by priority, then fairly by client and batch, then by arrival.

Among requests of one priority, the client whose running requests hold the fewest tokens is next. Among that client's
batches (requests that it sent together: several prompts, or several completions of one), the batch whose running
requests hold the fewest tokens is next. Within a batch, and between clients or batches with equal tokens, the request
that arrived first is next. So a client or batch with thousands of requests delays another client's single request by no
more than one of its own requests. For one client with batches of one request each, this is the order of arrival. A
running request counts with its number of tokens at its admission.

Owns the totals of the running requests of each client and batch. Adding, removing and finding the next request are
O(log n) in the number of waiting requests.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeAlias, TypeVar

from kvscope_engine.policy.ranked_queue import rank
from kvscope_engine.policy.request import Request

_Item = TypeVar("_Item", bound=Hashable)
_Batch: TypeAlias = tuple[str, str]
"""(client, batch identifier), the key of a batch."""


@dataclass(slots=True)
class RunningUsage:
    """Totals of the running requests of a client or a batch."""

    num_requests: int = 0
    num_tokens: int = 0
    num_preemptible_batches: int = 0
    """Number of the client's batches that are preemptible; 0 in the totals of a batch."""

    @property
    def is_preemptible(self) -> bool:
        """Whether at least two requests run, so that one may be preempted in favour of a client or batch that runs none
        (`fair_preemption`): the last running request is never preempted for this.
        """
        return self.num_requests > 1


class WaitingQueue:
    """Queue of waiting requests, ordered by priority, then by the running tokens of client and batch, then by arrival.

    `record_start` and `record_stop` update the totals of running requests.
    """

    def __init__(self) -> None:
        self._num_waiting = 0
        self._clients: _Ranking[str] = _Ranking()
        self._batches: dict[str, _Ranking[_Batch]] = {}
        self._requests: dict[_Batch, _Ranking[Request]] = {}
        self._usage: dict[str | _Batch, RunningUsage] = {}
        self.num_preemptible_clients = 0
        """Number of clients that are preemptible (`RunningUsage.is_preemptible`)."""
        self._tokens_at_admission: dict[int, int] = {}
        """Number of tokens that each running request had when it was admitted, by request number."""

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def first(self) -> Request:
        """Next request to schedule. The queue must not be empty."""
        return self._requests[self._batches[self._clients.first].first].first

    def add_request(self, request: Request) -> None:
        """Enqueue a request, which must not be queued already."""
        batch = batch_of(request)
        waiting = self._requests.setdefault(batch, _Ranking())
        assert request not in waiting, f"request {request.number} waits already"
        waiting.set_key(request, rank(request))
        self._num_waiting += 1
        self._update_ranks(batch)

    def remove(self, request: Request) -> None:
        batch = batch_of(request)
        waiting = self._requests.get(batch)
        assert waiting is not None, f"request {request.number} does not wait"
        assert request in waiting, f"request {request.number} does not wait"
        waiting.discard(request)
        self._num_waiting -= 1
        self._update_ranks(batch)

    def record_start(self, request: Request) -> None:
        """Record that a request runs. Its tokens count towards its client and batch until `record_stop`."""
        self._tokens_at_admission[request.number] = request.num_tokens
        self._add_usage(batch_of(request), 1, request.num_tokens)

    def record_stop(self, request: Request) -> None:
        self._add_usage(batch_of(request), -1, -self._tokens_at_admission.pop(request.number))

    def client_usage(self, request: Request) -> RunningUsage:
        """Return the totals of the running requests of `request`'s client. Callers must not modify them."""
        return self._usage.get(request.client, RunningUsage())

    def batch_usage(self, request: Request) -> RunningUsage:
        """Return the totals of the running requests of `request`'s batch. Callers must not modify them."""
        return self._usage.get(batch_of(request), RunningUsage())

    def _add_usage(self, batch: _Batch, num_requests: int, num_tokens: int) -> None:
        client_usage, batch_usage = (self._usage.setdefault(holder, RunningUsage()) for holder in (batch[0], batch))
        # Subtract what the client and batch count for now, and add what they count for after the change.
        self.num_preemptible_clients -= client_usage.is_preemptible
        client_usage.num_preemptible_batches -= batch_usage.is_preemptible
        for usage in (client_usage, batch_usage):
            usage.num_requests += num_requests
            usage.num_tokens += num_tokens
        client_usage.num_preemptible_batches += batch_usage.is_preemptible
        self.num_preemptible_clients += client_usage.is_preemptible
        for holder in (batch[0], batch):
            if not self._usage[holder].num_requests:
                del self._usage[holder]
        self._update_ranks(batch)

    def _update_ranks(self, batch: _Batch) -> None:
        """Update the ranks of a batch and of its client after a change of its waiting requests or running tokens."""
        client = batch[0]
        batches = self._batches.get(client)
        waiting = self._requests.get(batch)
        if waiting is not None:
            batches = self._batches.setdefault(client, _Ranking())
            if waiting:
                batches.set_key(batch, self._key(batch, waiting.first))
            else:
                batches.discard(batch)
                del self._requests[batch]
        # If `batches` is None, none of the client's requests waits, and neither it nor its batches have a rank.
        if batches:
            self._clients.set_key(client, self._key(client, self._requests[batches.first].first))
        elif batches is not None:
            self._clients.discard(client)
            del self._batches[client]

    def _key(self, holder: str | _Batch, first: Request) -> tuple[int, int, int, int]:
        usage = self._usage.get(holder)
        negative_priority, arrival_ns, number = rank(first)
        return negative_priority, 0 if usage is None else usage.num_tokens, arrival_ns, number


def batch_of(request: Request) -> _Batch:
    """Return the client and batch of a request. Without a batch identifier, the completions of one prompt form a
    batch.
    """
    return request.client, request.batch or request.request_id


class _Ranking(Generic[_Item]):
    """Priority queue of items whose sort keys may change.

    Removed items, and items whose key changed, leave stale heap entries, which are compacted in bulk.
    """

    __slots__ = ("_entries", "_entry_numbers", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], int, _Item]] = []
        self._entries: dict[_Item, tuple[tuple[int, ...], int, _Item]] = {}
        self._entry_numbers = count()  # so that entries with equal keys do not compare their items

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: _Item) -> bool:
        return item in self._entries

    @property
    def first(self) -> _Item:
        return self._heap[0][2]

    def set_key(self, item: _Item, key: tuple[int, ...]) -> None:
        entry = self._entries.get(item)
        if entry is None or entry[0] != key:
            entry = self._entries[item] = (key, next(self._entry_numbers), item)
            heappush(self._heap, entry)
            self._compact()

    def discard(self, item: _Item) -> None:
        if self._entries.pop(item, None) is not None:
            self._compact()

    def _compact(self) -> None:
        """Remove stale entries from the top of the heap, or all stale entries if there are too many."""
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = list(self._entries.values())
            heapify(self._heap)
        while self._heap and self._entries.get(self._heap[0][2]) is not self._heap[0]:
            heappop(self._heap)
