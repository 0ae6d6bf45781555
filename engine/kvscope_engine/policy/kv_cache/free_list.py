"""The free list: ids of the free blocks, in the order of their allocation. Independent of the ledger."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvscope_engine.policy.kv_groups import NULL_BLOCK

Ids = npt.NDArray[np.int64]


class FreeBlocks(Protocol):
    def __len__(self) -> int: ...

    @property
    def ids(self) -> Ids: ...

    @property
    def num_unmapped(self) -> int:
        """Number of blocks that are neither free nor in use: blocks without memory, and the null block."""

    @property
    def unmapped(self) -> Ids: ...

    def popleft(self) -> int:
        """Remove a block from the list and return it. The list must not be empty."""

    def popleft_n(self, count: int) -> list[int]: ...

    def append_n(self, ids: Ids) -> None: ...

    def check(self) -> None: ...


class AllMapped:
    __slots__ = ()

    @property
    def num_unmapped(self) -> int:
        return len(self.unmapped)

    @property
    def unmapped(self) -> Ids:
        return np.empty(0, np.int64)


class FreeList(AllMapped):
    """Stack of free block ids in one array.

    Initially the lowest id is allocated first; later, the block that was freed last. The cost of allocating and freeing
    does not depend on the size of the pool. With `keeps_null`, `NULL_BLOCK` is excluded.
    """

    __slots__ = ("_count", "_excluded", "_stack")

    def __init__(self, num_blocks: int, *, keeps_null: bool = False) -> None:
        self._excluded = np.array([NULL_BLOCK] if keeps_null else [], np.int64)
        self._count = num_blocks - len(self._excluded)
        self._stack = np.arange(num_blocks - 1, len(self._excluded) - 1, -1, dtype=np.int64)

    @property
    def unmapped(self) -> Ids:
        """The null block, if it is excluded; otherwise empty."""
        return self._excluded

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> Ids:
        """View of the free ids, shape `(len,)`. The last one is allocated next."""
        return self._stack[: self._count]

    def popleft(self) -> int:
        assert self._count, "a block was taken from an empty free list"
        self._count -= 1
        return int(self._stack[self._count])

    def popleft_n(self, count: int) -> list[int]:
        assert 0 <= count <= self._count, f"{count} blocks were taken from a free list of {self._count}"
        low = self._count - count
        taken: list[int] = self._stack[low : self._count][::-1].tolist()
        self._count = low
        return taken

    def append_n(self, ids: Ids) -> None:
        """Add `ids` to the list. The last of them is allocated next."""
        high = self._count + len(ids)
        assert high <= len(self._stack), f"{len(ids)} blocks given back to a free list of {self._count}: too many"
        self._stack[self._count : high] = ids
        self._count = high

    def check(self) -> None:
        assert len(np.unique(self.ids)) == self._count, "a block is on the free list twice"
