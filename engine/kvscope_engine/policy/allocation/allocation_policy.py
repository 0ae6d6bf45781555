"""The interface of allocation policies, which choose a request's next blocks.

The scheduler does not depend on how they choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.request import Request


class AllocationPolicy(Protocol):
    """Chooses blocks of a pool for a request. It does not write to requests: the scheduler owns block tables."""

    @property
    def name(self) -> str:
        """Name of the policy as in `--allocator`."""

    @property
    def reserves(self) -> bool:
        """Whether a request may hold blocks that are not in its table yet. If so, requests share no blocks."""

    @property
    def max_request_tokens(self) -> int:
        """Maximum length in tokens, prompt and output, of a request that could run alone."""

    def check_fits(self, request: Request) -> None:
        """Raise BadInput if the policy could not serve the request even if it ran alone."""

    def num_available(self, request: Request) -> int:
        """Return how many blocks `allocate` could return for `request` now, after a `move` if one is needed."""

    def num_held(self, request: Request) -> int:
        """Return how many blocks the request holds, including those not in its table."""

    def num_reserved_tokens(self, request: Request) -> int:
        """Return the token slots reserved for the request, used ones included; 0 if the policy does not reserve."""

    def num_reserved_blocks(self, request: Request) -> int:
        """Return the number of blocks reserved for the request when it starts; 0 if blocks are allocated as tokens
        come.
        """

    def move(self, request: Request, count: int) -> list[int] | None:
        """Return new blocks for those of the request's table, so that `count` more can follow; None if they need not
        move.

        The old ones are not allocated again until `settle`: they are copied from in this step.
        """

    def allocate(self, request: Request, count: int, group: int = 0) -> list[int]:
        """Return the next `count` blocks of the request's table in a KV group, at most `num_available`.

        A policy that reserves has one group.
        """

    def release(self, request: Request, step: int) -> None: ...

    def commit(self, step: int) -> None:
        """Record that the step ran: its copies were made, and their sources may be reused."""

    def holders(self, requests: Iterable[Request]) -> list[Sequence[int]]:
        """Return lists of blocks, each of which holds one reference to each of its blocks; for the integrity check."""


class TableAllocation:
    """Common part of the policies whose requests hold exactly the blocks of their tables, which never move."""

    def num_held(self, request: Request) -> int:
        return len(request.held_blocks)

    def num_reserved_tokens(self, request: Request) -> int:
        return 0

    def num_reserved_blocks(self, request: Request) -> int:
        return 0

    def move(self, request: Request, count: int) -> list[int] | None:
        return None

    def commit(self, step: int) -> None: ...


class PagedAllocation(TableAllocation):
    """Allocates any block for any request: free ones first, then the least recently used cached one."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def name(self) -> str:
        return "paged"

    @property
    def reserves(self) -> bool:
        return False

    @property
    def max_request_tokens(self) -> int:
        return self._pool.num_usable * self._pool.block_size

    def check_fits(self, request: Request) -> None:
        """Accept every request: what fits into the pool can be served."""

    def num_available(self, request: Request) -> int:
        """Return the number of blocks that no request holds; the same for every request."""
        return self._pool.num_available

    def allocate(self, request: Request, count: int, group: int = 0) -> list[int]:
        return self._pool.allocate(count, request.number, group)

    def release(self, request: Request, step: int) -> None:
        """Return the blocks of the table to the pool; full hashed ones without another reference stay cached."""
        self._pool.release(request.held_blocks, step)

    def holders(self, requests: Iterable[Request]) -> list[Sequence[int]]:
        return [request.held_blocks for request in requests]
