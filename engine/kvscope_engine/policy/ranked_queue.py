"""The order of service: higher priority first, then first come, first served."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from kvscope_engine.policy.request import Request


def rank(request: Request) -> tuple[int, int, int]:
    """Sorts requests in the order of service; no two are equal, and it never changes."""
    return (-request.priority, request.arrival_ns, request.number)


class RankedQueue:
    """Requests in the order of service. Finding a place is O(log n); moving pointers is a memmove."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """From first to last. Nobody may come or go meanwhile."""
        return iter(self._requests)

    @property
    def first(self) -> Request:
        """The next to be served. There must be one."""
        return self._requests[0]

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        insort(self._requests, request, key=rank)

    def remove(self, request: Request) -> None:
        """Take out a request that is here."""
        place = bisect_left(self._requests, rank(request), key=rank)
        assert self._requests[place] is request, f"request {request.number} is not where its rank puts it"
        del self._requests[place]

    def pop_first(self) -> Request:
        """Take out the next to be served."""
        return self._requests.pop(0)
