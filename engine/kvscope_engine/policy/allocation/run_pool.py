"""A block pool that gives blocks in runs: for the policies from before PagedAttention.

Owns which runs are free (`buddy_list`). It has no prefix cache: a cached block would stand in the way of runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvscope_engine.policy.allocation.buddy_list import BuddyList
from kvscope_engine.policy.blocks.block_pool import BlockPool


class RunPool(BlockPool):
    """A pool of `num_blocks` blocks, all free at first, without a prefix cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._runs = BuddyList(num_blocks)
        super().__init__(num_blocks, block_size, prefix_caching=False, free=self._runs)

    @property
    def longest_run(self) -> int:
        """Blocks of the longest run that `allocate_run` can give, 0 when nothing is free."""
        return self._runs.longest

    def allocate_run(self, length: int, owner: int) -> list[int]:
        """`length` blocks in a row for request `owner`: a power of two, at most `longest_run`."""
        start = self._runs.take_run(length)
        self._activate(np.arange(start, start + length, dtype=np.int64), owner)
        return list(range(start, start + length))

    def can_extend_run(self, run: Sequence[int]) -> bool:
        """Whether `extend_run` can double `run`."""
        return self._runs.has_buddy(run[0], len(run))

    def extend_run(self, run: Sequence[int], owner: int) -> list[int]:
        """`run`, active, and as many blocks before or after it: a run of twice its length for request `owner`."""
        buddy = self._runs.take_buddy(run[0], len(run))
        self._activate(np.arange(buddy, buddy + len(run), dtype=np.int64), owner)
        start = min(buddy, run[0])
        return list(range(start, start + 2 * len(run)))
