"""The block pool of the synthetic engine: a ledger whose rows change as a real pool's would.

Owns the ledger, the free stack and the order of eviction; remembers the rows touched since it was last asked.
No policy worth the name: blocks come from the free stack, then from the oldest cached ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import NO_OWNER, BlockState, Ledger

Ids = npt.NDArray[np.int64]
_PREFIX_HITS_LIMIT = (1 << 16) - 1
_HASHES_AHEAD = 4096
_TEXT_BLOCKS = 100
"""Of the cached texts that it begins with; every other one goes on from the middle of the one before."""


class SyntheticPool:
    """`num_blocks` blocks, a share of which is cached from the beginning; `num_lower` rows after them are others'."""

    def __init__(
        self, num_blocks: int, block_size: int, rng: np.random.Generator, cached_share: float, num_lower: int = 0
    ) -> None:
        self.ledger = Ledger(num_blocks + num_lower)
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int, int], None] | None = None
        """Told (block, step) of a cached block before it is given up."""
        self.block_size = block_size
        self.num_evicted = 0
        self._rng = rng
        self._fresh = np.empty(0, np.uint64)  # hashes that nobody has yet: to draw a few costs as much as hundreds
        self._touched: list[Ids] = []
        self._before = np.full(num_blocks, -1)  # the block before each in its text, -1 for the first
        num_cached = int(num_blocks * cached_share)
        self._free = np.arange(num_blocks - 1, -1, -1)  # a stack: its top is [num_free - 1]
        self.num_free = num_blocks - num_cached
        self._cached = deque(range(num_cached))
        self.pinned: set[int] = set()
        """Cached or in use: they are not evicted."""
        self._make_cached(np.arange(num_cached))

    def take(self, count: int, owner: int, step: int, after: int = -1) -> Ids | None:
        """`count` empty blocks for `owner`, None when there are not so many; in its text they follow `after`."""
        while self.num_free < count:
            if not self._evict(step):
                return None
        self.num_free -= count
        ids = self._free[self.num_free : self.num_free + count][::-1].copy()
        ledger = self.ledger
        ledger.state[ids], ledger.ref_count[ids], ledger.owner[ids] = BlockState.ACTIVE, 1, owner
        ledger.filled[ids], ledger.prefix_hits[ids], ledger.hash[ids], ledger.parent[ids] = 0, 0, 0, 0
        self._before[ids] = [after, *ids[:-1].tolist()][:count]
        self.touch(ids, step)
        return ids

    def hit(self, count: int, step: int) -> Ids:
        """Up to `count` of the blocks cached last, now held once more, as a shared prefix would be."""
        wanted = [self._cached.pop() for _ in range(min(count, len(self._cached)))]
        ids = np.array([b for b in dict.fromkeys(wanted) if self._is_cached(b)], np.int64)
        ledger = self.ledger
        ledger.state[ids], ledger.ref_count[ids] = BlockState.ACTIVE, 1
        ledger.prefix_hits[ids] = np.minimum(ledger.prefix_hits[ids].astype(np.int64) + 1, _PREFIX_HITS_LIMIT)
        self.touch(ids, step)
        return ids

    def share(self, ids: Ids, step: int) -> None:
        """Hold blocks that are active already once more."""
        self.ledger.ref_count[ids] += 1
        self.touch(ids, step)

    def write(self, ids: Ids, filled: npt.NDArray[np.int64], step: int) -> None:
        """Set how many slots of `ids` hold a token; full blocks get a hash."""
        self.ledger.filled[ids] = filled
        full = ids[filled == self.block_size]
        if len(full):
            self.ledger.hash[full] = self._hashes(len(full))
            before = self._before[full]
            self.ledger.parent[full] = np.where(before < 0, np.uint64(0), self.ledger.hash[before])
        self.touch(ids, step)

    def release(self, ids: Ids, step: int) -> None:
        """One holder less; what nobody holds is cached when it is full, free otherwise."""
        ledger = self.ledger
        ledger.ref_count[ids] -= 1
        gone = ids[ledger.ref_count[ids] == 0]
        is_full = ledger.filled[gone] == self.block_size
        cached, freed = gone[is_full], gone[~is_full]
        ledger.state[cached] = BlockState.CACHED
        self._cached.extend(cached.tolist())
        self._clear(freed)
        self.touch(ids, step)

    def evict_these(self, blocks: list[int], step: int) -> None:
        """Cached `blocks`, not pinned, hold nothing any more."""
        for block in blocks:
            self._give_up(block, step)

    def take_changed(self) -> npt.NDArray[np.uint32]:
        """Blocks whose rows changed since the last call, ascending."""
        touched, self._touched = self._touched, []
        if not touched:
            return np.empty(0, np.uint32)
        ids = np.concatenate(touched).astype(np.uint32)
        ids.sort()  # of so few np.unique costs several times as much
        is_new = np.ones(ids.size, np.bool_)
        np.not_equal(ids[1:], ids[:-1], out=is_new[1:])
        return ids[is_new]

    def _evict(self, step: int) -> bool:
        for _ in range(len(self._cached)):
            block = self._cached.popleft()
            if block in self.pinned:
                self._cached.append(block)
            elif self._is_cached(block):
                self._give_up(block, step)
                return True
        return False

    def _give_up(self, block: int, step: int) -> None:
        if self.on_evict is not None:
            self.on_evict(block, step)
        self._clear(np.array([block]))
        self._touched.append(np.array([block]))
        self.num_evicted += 1

    def _clear(self, ids: Ids) -> None:
        ledger = self.ledger
        ledger.state[ids], ledger.owner[ids] = BlockState.FREE, NO_OWNER
        ledger.filled[ids], ledger.prefix_hits[ids], ledger.hash[ids], ledger.parent[ids] = 0, 0, 0, 0
        self._free[self.num_free : self.num_free + len(ids)] = ids
        self.num_free += len(ids)

    def _is_cached(self, block: int) -> bool:
        return bool(self.ledger.state[block] == BlockState.CACHED)

    def touch(self, ids: Ids, step: int) -> None:
        """Rows `ids` change in `step`."""
        self.ledger.last_used_step[ids] = step
        self._touched.append(ids)

    def _make_cached(self, ids: Ids) -> None:
        ledger = self.ledger
        ledger.state[ids], ledger.filled[ids] = BlockState.CACHED, self.block_size
        ledger.owner[ids] = 0
        ledger.hash[ids] = self._hashes(len(ids))
        ledger.parent[ids[1:]] = ledger.hash[ids[:-1]]
        first = ids[::_TEXT_BLOCKS]
        ledger.parent[first[::2]] = 0
        ledger.parent[first[1::2]] = ledger.hash[first[1::2] - _TEXT_BLOCKS // 2]

    def _hashes(self, count: int) -> npt.NDArray[np.uint64]:
        if count > self._fresh.size:
            self._fresh = self._rng.integers(1, 1 << 63, max(count, _HASHES_AHEAD), np.uint64)
        hashes, self._fresh = self._fresh[:count], self._fresh[count:]
        return hashes
