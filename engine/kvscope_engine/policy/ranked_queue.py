"""Requests in scheduling order: higher priority first, then earlier arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from kvscope_engine.policy.request import Request


def rank(request: Request) -> tuple[int, int, int]:
    """Return the sort key of the scheduling order. No two requests have the same key, and the key of a request
    never changes.
    """
    return (-request.priority, request.arrival_ns, request.number)


class RankedQueue:
    """Requests sorted by `rank`. A lookup is O(log n); inserting and removing move pointers (memmove)."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate from the highest to the lowest rank. The queue must not change during the iteration."""
        return iter(self._requests)

    @property
    def first(self) -> Request:
        """Request with the highest rank. The queue must not be empty."""
        return self._requests[0]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=rank)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, rank(request), key=rank)
        assert self._requests[index] is request, f"request {request.number} is not where its rank puts it"
        del self._requests[index]

    def pop_first(self) -> Request:
        return self._requests.pop(0)
