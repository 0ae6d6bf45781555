"""Tracks the order in which a host engine would reuse its free blocks, as the ledger's column `eviction_order`.

The value is 0 for blocks in use, and grows from the next block to be reused to the last. Used on the publishing thread
only.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.producer.cache_state import CacheState

MIDDLE: Final = 1 << 31
"""First value of `eviction_order`. Blocks are queued at both ends, so numbering starts in the middle of the
uint32 range.
"""
MAX_ORDER: Final = (1 << 32) - 1


class FreeBlockQueue:
    """Queue of reusable blocks. Initially it contains all blocks except the reserved ones, ordered by id."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._start = self._end = MIDDLE
        """Order number of the first block in the queue. The numbers in use are `_start` to `_end` - 1."""
        cache = state.hello.cache
        self._renumber(np.arange(cache.num_reserved_blocks, cache.num_blocks))

    def append(self, blocks: list[int]) -> None:
        if self._end + len(blocks) > MAX_ORDER:
            self._renumber(self._queued())
        start, self._end = self._end, self._end + len(blocks)
        self._set(blocks, start)

    def prepend(self, blocks: list[int]) -> None:
        if self._start <= len(blocks):
            self._renumber(self._queued())
        self._start -= len(blocks)
        self._set(blocks, self._start)

    def _queued(self) -> npt.NDArray[np.intp]:
        order = self._state.ledger.eviction_order
        queued = np.flatnonzero(order)
        return queued[np.argsort(order[queued])]

    def _renumber(self, blocks: npt.NDArray[np.intp]) -> None:
        self._start, self._end = MIDDLE, MIDDLE + blocks.size
        self._set(blocks, MIDDLE)

    def _set(self, blocks: list[int] | npt.NDArray[np.intp], start: int) -> None:
        order = np.arange(start, start + len(blocks), dtype=np.uint32)
        self._state.set_blocks(blocks, eviction_order=order)
