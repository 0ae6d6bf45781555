"""The interface of allocation policies, which choose a request's next blocks. The scheduler does not know how they
choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.request import Request


class AllocationPolicy(Protocol):
    """Chooses blocks for a request out of a pool. It writes no request: the scheduler owns block tables."""

    @property
    def name(self) -> str:
        """What `--allocator` calls it."""

    @property
    def reserves(self) -> bool:
        """Whether a request holds blocks that are not in its table yet. Then no two share a block."""

    @property
    def max_request_tokens(self) -> int:
        """The longest prompt and output together that could run alone."""

    def check_fits(self, request: Request) -> None:
        """Raise BadInput when the policy could not serve the request even if it ran alone."""

    def num_available(self, request: Request) -> int:
        """How many blocks `take` could give to `request` now, after a `move` where one is needed."""

    def num_held(self, request: Request) -> int:
        """How many blocks the request holds, those not in its table among them."""

    def num_reserved_tokens(self, request: Request) -> int:
        """Slots set aside for the request, those in use among them; 0 when the policy does not reserve."""

    def num_set_aside(self, request: Request) -> int:
        """Blocks that the request gets at once when it starts, used or not; 0 where they come as tokens do."""

    def move(self, request: Request, count: int) -> list[int] | None:
        """New places for the blocks of the request's table, where `count` more are to follow; None: they stay.

        The old ones go to nobody else until `settle`: they are copied from in this step.
        """

    def allocate(self, request: Request, count: int, group: int = 0) -> list[int]:
        """The next `count` blocks of the request's table in a KV group, at most `num_available`; a policy that reserves
        has one group."""

    def release(self, request: Request, step: int) -> None:
        """Let go of every block that the request holds."""

    def settle(self, step: int) -> None:
        """The step was run: nothing is copied from any more."""

    def holders(self, requests: Iterable[Request]) -> list[Sequence[int]]:
        """For the integrity check: lists of blocks, each of which holds each of its blocks once."""


class TableAllocation:
    """What policies share under which a request holds the blocks of its table and no others, where they are."""

    def num_held(self, request: Request) -> int:
        """The blocks of the table."""
        return len(request.held_blocks)

    def num_reserved_tokens(self, request: Request) -> int:
        """None."""
        return 0

    def num_set_aside(self, request: Request) -> int:
        """None."""
        return 0

    def move(self, request: Request, count: int) -> list[int] | None:
        """Blocks stay where they are."""
        return None

    def settle(self, step: int) -> None:
        """Nothing was moved."""


class PagedAllocation(TableAllocation):
    """Any block serves any request: whatever is free, then the cached block unused for longest."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def name(self) -> str:
        """What `--allocator` calls it."""
        return "paged"

    @property
    def reserves(self) -> bool:
        """Blocks are taken as tokens come."""
        return False

    @property
    def max_request_tokens(self) -> int:
        """All the pool."""
        return self._pool.num_usable * self._pool.block_size

    def check_fits(self, request: Request) -> None:
        """What fits into the pool can be served."""

    def num_available(self, request: Request) -> int:
        """Every block that no request holds, whoever asks."""
        return self._pool.num_available

    def allocate(self, request: Request, count: int, group: int = 0) -> list[int]:
        """The next `count` blocks, no two of them necessarily neighbours."""
        return self._pool.allocate(count, request.number, group)

    def release(self, request: Request, step: int) -> None:
        """Blocks of the table go back to the pool; full hashed ones that nobody else holds stay cached."""
        self._pool.release(request.held_blocks, step)

    def holders(self, requests: Iterable[Request]) -> list[Sequence[int]]:
        """The block tables."""
        return [request.held_blocks for request in requests]
