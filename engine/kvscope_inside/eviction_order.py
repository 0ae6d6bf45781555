"""The order in which a host engine would give out its free blocks, as the ledger's column `eviction_order`: 0 for
blocks that are held, and numbers that grow from the next block to the last one.

Belongs to the thread that publishes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.state.cache_state import CacheState

MIDDLE: Final = 1 << 31
"""Blocks are queued at both ends, so numbers begin in the middle."""
MAX_ORDER: Final = (1 << 32) - 1


class FreeBlockQueue:
    """Queue of the blocks that may be given out; all but the reserved ones at first, by their ids."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._start = self._end = MIDDLE
        """The numbers in use are `_start` up to `_end`."""
        cache = state.hello.cache
        self._renumber(np.arange(cache.num_reserved_blocks, cache.num_blocks))

    def append(self, blocks: list[int]) -> None:
        """Queue blocks to be given out last."""
        if self._end + len(blocks) > MAX_ORDER:
            self._renumber(self._queued())
        start, self._end = self._end, self._end + len(blocks)
        self._set(blocks, start)

    def prepend(self, blocks: list[int]) -> None:
        """Queue blocks to be given out first."""
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
