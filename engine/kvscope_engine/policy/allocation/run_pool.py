"""Block pool that allocates contiguous runs of blocks, for the policies that predate PagedAttention.

Owns the free runs (`BuddyList`). It has no prefix cache, because cached blocks would break up the runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.kv_cache.free_list import AllMapped
from kvscope_telemetry.ledger import Tier


class RunPool(BlockPool):
    def __init__(self, num_blocks: int, block_size: int, *, num_states: int = 0) -> None:
        self._runs = BuddyList(num_blocks)
        tiers = {Tier.STATES: num_states}
        super().__init__(num_blocks, block_size, prefix_caching=False, other_tiers=tiers, free=self._runs)

    @property
    def longest_run(self) -> int:
        return self._runs.longest

    def allocate_run(self, length: int, owner: int) -> list[int]:
        """Return `length` contiguous blocks for request `owner`. `length` must be a power of two and at most
        `longest_run`.
        """
        start = self._runs.allocate_run(length)
        self._activate(np.arange(start, start + length, dtype=np.int64), owner)
        return list(range(start, start + length))

    def can_extend_run(self, run: Sequence[int]) -> bool:
        return self._runs.has_buddy(run[0], len(run))

    def extend_run(self, run: Sequence[int], owner: int) -> list[int]:
        """Double the allocated `run` by its free buddy before or after it.

        Returns the blocks of the doubled run, which belongs to request `owner`.
        """
        buddy = self._runs.allocate_buddy(run[0], len(run))
        self._activate(np.arange(buddy, buddy + len(run), dtype=np.int64), owner)
        start = min(buddy, run[0])
        return list(range(start, start + 2 * len(run)))


class BuddyList(AllMapped):
    """Free blocks as contiguous runs: a buddy allocator (Knowlton 1965).

    The number of blocks of a run is a power of two, and the run starts at a multiple of its length. Two free halves of
    a run ("buddies") are always merged, so free runs are split no further than necessary. The class has the methods of
    `FreeList`, which it replaces in a pool, and `allocate_run`.

    All `num_blocks` blocks are free at first. If `num_blocks` is not a power of two, they form one run for each 1 among
    its binary digits, longest first. Allocating and freeing a run costs O(log num_blocks).
    """

    __slots__ = ("_count", "_num_blocks", "_starts")

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._count = 0
        # [order]: first blocks of the free runs of 2**order; a dict, because its order makes runs reproducible
        self._starts: list[dict[int, None]] = [{} for _ in range(num_blocks.bit_length())]
        self._free_span(0, num_blocks)

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Ids of the free blocks, shape `(len,)`. Takes O(len): for the integrity check."""
        spans = [np.arange(start, start + length, dtype=np.int64) for start, length in self.runs()]
        return np.concatenate(spans) if spans else np.empty(0, np.int64)

    @property
    def longest(self) -> int:
        return next((1 << order for order in reversed(range(len(self._starts))) if self._starts[order]), 0)

    def runs(self) -> Iterator[tuple[int, int]]:
        for order, starts in enumerate(self._starts):
            for start in starts:
                yield start, 1 << order

    def allocate_run(self, length: int) -> int:
        """Allocate a run of `length` blocks, a power of two of at most `longest`, and return its first block.

        The shortest free run that is long enough is used, and split in halves.
        """
        assert length & (length - 1) == 0 < length <= self.longest, f"no run of {length} blocks is free"
        order = length.bit_length() - 1
        source_order = next(higher for higher in range(order, len(self._starts)) if self._starts[higher])
        start = self._starts[source_order].popitem()[0]
        for half_order in reversed(range(order, source_order)):
            self._starts[half_order][start + (1 << half_order)] = None
        self._count -= length
        return start

    def has_buddy(self, start: int, length: int) -> bool:
        """Whether the run's buddy, the other half of the aligned run of twice its length, is free."""
        return start ^ length in self._starts[length.bit_length() - 1]

    def allocate_buddy(self, start: int, length: int) -> int:
        """Allocate the run's buddy, which must be free. Returns its first block."""
        assert self.has_buddy(start, length), f"the other half to the run of {length} blocks at {start} is not free"
        buddy = start ^ length
        del self._starts[length.bit_length() - 1][buddy]
        self._count -= length
        return buddy

    def popleft(self) -> int:
        return self.allocate_run(1)

    def popleft_n(self, count: int) -> list[int]:
        """Return `count` free blocks, at most `len(self)`, not necessarily contiguous."""
        assert 0 <= count <= self._count, f"{count} blocks were taken from a buddy list of {self._count}"
        return [self.allocate_run(1) for _ in range(count)]

    def append_n(self, ids: npt.NDArray[np.int64]) -> None:
        """Free the blocks `ids`, which must be distinct, in any order."""
        if len(ids):
            in_order = np.sort(ids)
            for span in np.split(in_order, np.flatnonzero(np.diff(in_order) != 1) + 1):
                self._free_span(int(span[0]), int(span[-1]) + 1)

    def check(self) -> None:
        """Raise AssertionError unless runs are aligned, inside the pool, disjoint and merged where possible."""
        end = 0
        for start, length in sorted(self.runs()):
            assert start % length == 0, f"a free run of {length} blocks starts at {start}"
            assert start >= end, f"block {start} is in two free runs"
            end = start + length
            buddy = start ^ length
            assert buddy not in self._starts[length.bit_length() - 1], f"the free runs at {start} and {buddy} are apart"
        assert end <= self._num_blocks, f"a free run ends at {end}, the pool at {self._num_blocks}"
        assert sum(length for _, length in self.runs()) == self._count, f"{self._count} blocks are not what is free"

    def _free_span(self, start: int, stop: int) -> None:
        """Free blocks `start` to `stop` (exclusive) as the longest possible aligned runs."""
        self._count += stop - start
        assert self._count <= self._num_blocks, f"{stop - start} blocks given back to a full buddy list"
        while start < stop:
            order = (stop - start).bit_length() - 1
            if start:
                order = min(order, (start & -start).bit_length() - 1)
            self._merge(start, order)
            start += 1 << order

    def _merge(self, start: int, order: int) -> None:
        while order < len(self._starts) and (start ^ (1 << order)) in self._starts[order]:
            del self._starts[order][start ^ (1 << order)]
            start &= ~(1 << order)
            order += 1
        self._starts[order][start] = None
