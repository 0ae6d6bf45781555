"""Requests that wait, in the order of service: coming and going is O(log n), however many there are."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import TypeAlias

from kvscope_engine.policy.ranked_queue import rank
from kvscope_engine.policy.request import Request

_Place: TypeAlias = tuple[tuple[int, int, int], int, Request]
"""Rank, a number of its own (a request may come twice), and who."""


class WaitingQueue:
    """A heap by rank. Who leaves from the middle keeps a place that no longer counts, until there are too many."""

    __slots__ = ("_heap", "_members", "_numbers")

    def __init__(self) -> None:
        self._heap: list[_Place] = []
        self._members: dict[int, _Place] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._members)

    @property
    def first(self) -> Request:
        """The next to be served. There must be one."""
        return self._heap[0][2]

    def add(self, request: Request) -> None:
        """Put a request in its place. It must not be here."""
        assert request.number not in self._members, f"request {request.number} waits already"
        place = self._members[request.number] = (rank(request), next(self._numbers), request)
        heappush(self._heap, place)

    def remove(self, request: Request) -> None:
        """Take out a request that is here."""
        assert self._members.pop(request.number, None) is not None, f"request {request.number} does not wait"
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = list(self._members.values())
            heapify(self._heap)
        self._drop_gone()

    def pop_first(self) -> Request:
        """Take out the next to be served."""
        request = heappop(self._heap)[2]
        del self._members[request.number]
        self._drop_gone()
        return request

    def _drop_gone(self) -> None:
        """The first in the heap is one that waits."""
        while self._heap and self._members.get(self._heap[0][2].number) is not self._heap[0]:
            heappop(self._heap)
