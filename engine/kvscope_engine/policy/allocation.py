"""Where a request's next blocks come from. The scheduler asks; it does not know how they are chosen."""

from __future__ import annotations

from typing import Protocol

from kvscope_engine.policy.block_pool import BlockPool
from kvscope_engine.policy.request import Request


class AllocationPolicy(Protocol):
    """Chooses blocks for a request out of a pool. It writes no request: the scheduler owns block tables."""

    @property
    def name(self) -> str:
        """What `--allocator` calls it."""

    def num_available(self, request: Request) -> int:
        """How many blocks `take` could give to `request` now."""

    def take(self, request: Request, count: int) -> list[int]:
        """The next `count` blocks of the request's table, at most `num_available`."""

    def release(self, request: Request, step: int) -> None:
        """Let go of every block of the request's table."""


class PagedAllocation:
    """Any block serves any request: whatever is free, then the cached block unused for longest."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def name(self) -> str:
        """What `--allocator` calls it."""
        return "paged"

    def num_available(self, request: Request) -> int:
        """Every block that no request holds, whoever asks."""
        return self._pool.num_available

    def take(self, request: Request, count: int) -> list[int]:
        """The next `count` blocks, no two of them necessarily neighbours."""
        return self._pool.allocate(count, request.number)

    def release(self, request: Request, step: int) -> None:
        """Blocks of the table go back to the pool; full hashed ones that nobody else holds stay cached."""
        self._pool.release(request.block_table, step)
