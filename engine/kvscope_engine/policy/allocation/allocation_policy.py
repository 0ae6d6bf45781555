"""Interface of allocation policies, which choose a request's next blocks, and the default policy `paged`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.request import Request


class AllocationPolicy(Protocol):
    """Chooses blocks of a pool for a request. A policy does not write to requests: the scheduler owns block tables."""

    @property
    def name(self) -> str:
        """Name of the policy, as the option `--allocator` accepts it."""

    @property
    def reserves(self) -> bool:
        """Whether a request may hold blocks that are not in its block table yet. If so, requests share no blocks."""

    @property
    def max_request_tokens(self) -> int:
        """Maximum number of tokens, prompt and output, of a request that runs alone."""

    def check_fits(self, request: Request) -> None:
        """Raise BadInput if the policy could not serve the request even if it ran alone."""

    def num_available(self, request: Request) -> int:
        """Return the number of blocks that `allocate` can return for `request` now, after a `move` if one is needed."""

    def num_held(self, request: Request) -> int:
        """Return the number of blocks that the request holds, including those not in its block table."""

    def num_reserved_tokens(self, request: Request) -> int:
        """Return the number of token slots reserved for the request, used ones included; 0 if the policy does not
        reserve.
        """

    def num_reserved_blocks(self, request: Request) -> int:
        """Return the number of blocks reserved for the request when it starts; 0 if the policy does not reserve."""

    def move(self, request: Request, count: int) -> list[int] | None:
        """Move the request to other blocks if that is needed before `count` more blocks can be added to its table.

        Returns the new blocks for the whole block table, or None if no move is needed. The step copies from the old
        blocks, so they are not allocated again until `commit`.
        """

    def allocate(self, request: Request, count: int, group: int = 0) -> list[int]:
        """Return the next `count` blocks of the request's table in a KV group, at most `num_available`.

        A policy that reserves has one group.
        """

    def release(self, request: Request, step: int) -> None: ...

    def commit(self, step: int) -> None:
        """Free the old blocks of moved requests, after the step that copied from them."""

    def holders(self, requests: Iterable[Request]) -> list[Sequence[int]]:
        """Return the block lists of all holders of block references, for the integrity check."""


class TableAllocation:
    """Base of policies whose requests hold exactly the blocks of their tables, which never move."""

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
    """Allocates any block for any request: free blocks first, then the least recently used cached block."""

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
        """Accept every request: all blocks of the pool can serve any request."""

    def num_available(self, request: Request) -> int:
        """Return the number of free and evictable blocks; the same for every request."""
        return self._pool.num_available

    def allocate(self, request: Request, count: int, group: int = 0) -> list[int]:
        return self._pool.allocate(count, request.number, group)

    def release(self, request: Request, step: int) -> None:
        """Return the request's blocks to the pool. Full hashed blocks without another reference stay cached."""
        self._pool.release(request.held_blocks, step)

    def holders(self, requests: Iterable[Request]) -> list[Sequence[int]]:
        return [request.held_blocks for request in requests]
