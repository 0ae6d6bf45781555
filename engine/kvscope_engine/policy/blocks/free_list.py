"""The ids of free blocks: a stack, so that taking and giving back cost the same however large the pool is.

Owns the order in which free blocks are handed out: lowest id first in a fresh pool, then the one freed last.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class FreeList:
    """A stack of block ids over one array, all `num_blocks` of them at first."""

    __slots__ = ("_count", "_stack")

    def __init__(self, num_blocks: int) -> None:
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int64)
        self._count = num_blocks

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """A view of the free ids, shape `(len,)`; the next to be handed out is the last."""
        return self._stack[: self._count]

    def take_one(self) -> int:
        """The next free block. There must be one."""
        assert self._count, "a block was taken from an empty free list"
        self._count -= 1
        return int(self._stack[self._count])

    def take(self, count: int) -> list[int]:
        """The next `count` free blocks, at most `len(self)`."""
        assert 0 <= count <= self._count, f"{count} blocks were taken from a free list of {self._count}"
        low = self._count - count
        taken: list[int] = self._stack[low : self._count][::-1].tolist()
        self._count = low
        return taken

    def give(self, ids: npt.NDArray[np.int64]) -> None:
        """Take `ids` back; the last of them is the next to be handed out."""
        high = self._count + len(ids)
        assert high <= len(self._stack), f"{len(ids)} blocks given back to a free list of {self._count}: too many"
        self._stack[self._count : high] = ids
        self._count = high
