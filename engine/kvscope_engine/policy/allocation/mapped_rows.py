"""Free list of the pool under the policy `virtual`: which ledger rows have memory, and which of those are free.

Owns two flags per row. Callers choose the rows to map and to allocate, and know the slots and page groups that the rows
belong to; this module does not.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class MappedRows:
    """Flags of `num_blocks` ledger rows, all of them initially unmapped (without memory).

    A mapped row is free or in use. The free rows implement `FreeBlocks` (`kv_cache.free_list`): `len` and `ids` are
    those of the free rows, and `append_n` frees rows. `popleft` and `popleft_n` raise, because the caller of `allocate`
    chooses the rows.
    """

    __slots__ = ("_is_free", "_is_mapped", "_num_free", "_num_mapped")

    def __init__(self, num_blocks: int) -> None:
        self._is_mapped = np.zeros(num_blocks, np.bool_)
        self._is_free = np.zeros(num_blocks, np.bool_)
        self._num_mapped = 0
        self._num_free = 0

    def __len__(self) -> int:
        return self._num_free

    @property
    def ids(self) -> Ids:
        return np.flatnonzero(self._is_free)

    @property
    def unmapped(self) -> Ids:
        return np.flatnonzero(~self._is_mapped)

    @property
    def num_unmapped(self) -> int:
        return len(self._is_mapped) - self._num_mapped

    def map(self, ids: Ids) -> None:
        assert not self._is_mapped[ids].any(), f"rows {ids.tolist()} are mapped in part already"
        self._is_mapped[ids] = True
        self._num_mapped += len(ids)
        self.append_n(ids)

    def unmap(self, ids: Ids) -> None:
        """Mark free rows as unmapped."""
        self.allocate(ids)
        self._is_mapped[ids] = False
        self._num_mapped -= len(ids)

    def allocate(self, ids: Ids) -> None:
        assert self._is_free[ids].all(), f"rows {ids.tolist()} are not all free and mapped"
        self._is_free[ids] = False
        self._num_free -= len(ids)

    def append_n(self, ids: Ids) -> None:
        """Mark used rows as free. They stay mapped."""
        assert self._is_mapped[ids].all(), f"rows {ids.tolist()} are not all mapped"
        assert not self._is_free[ids].any(), f"rows {ids.tolist()} are free in part already"
        self._is_free[ids] = True
        self._num_free += len(ids)

    def popleft(self) -> NoReturn:
        raise AssertionError("rows of address space are chosen by the caller of `allocate`")

    def popleft_n(self, count: int) -> NoReturn:
        raise AssertionError(f"{count} rows are needed: rows of address space are chosen by the caller of `allocate`")

    def check(self) -> None:
        assert self._num_mapped == np.count_nonzero(self._is_mapped), "rows with memory are miscounted"
        assert self._num_free == np.count_nonzero(self._is_free), "free rows are miscounted"
        assert not (self._is_free & ~self._is_mapped).any(), "a row without memory is free"
