"""The slots of one lower tier (host memory or disk), which are ledger rows after those of the pool's blocks.

Owns these rows, their free list, the index of cached prefixes, and the eviction order. Copies no bytes, and does not
decide what is stored (`LowerTiers`). A slot is free, cached (without references; its prefix can be found) or active
(held by `ref_count` swapped-out requests or copies in progress).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.kv_cache.eviction_order import EvictionOrder
from kvscope_engine.policy.prefixes.prefix_index import Prefix, published_hash
from kvscope_telemetry.ledger import NO_OWNER, BlockState, Ledger, Tier


class TierSlots:
    """Ledger rows of the slots of `tier`, all free at first. Methods use the ledger's row numbers."""

    def __init__(self, pool: BlockPool, tier: Tier) -> None:
        rows = pool.rows_by_tier[tier]
        self.first = first = rows.start
        self.count = count = len(rows)
        self._pool = pool
        self._tier = tier
        self._columns = _Columns(pool.ledger)
        self._free = list(range(first + count - 1, first - 1, -1))
        self._eviction_order = EvictionOrder(pool.ledger.eviction_order, pool.changed_rows)  # nothing in it is pinned
        self._row_of: dict[bytes, int] = {}
        self._prefix_of: dict[int, Prefix] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._eviction_order)

    def __contains__(self, row: int) -> bool:
        return self.first <= row < self.first + self.count

    def slots(self, rows: Sequence[int]) -> list[int]:
        """Return the slot numbers within the tier, from 0, of ledger `rows`. `TierMover` uses slot numbers."""
        return [row - self.first for row in rows]

    def find(self, digest: bytes) -> int | None:
        return self._row_of.get(digest)

    def prefix(self, row: int) -> Prefix | None:
        """Return the prefix stored in the ledger row.

        Returns None for a free row, and for a swapped-out request's partial block.
        """
        return self._prefix_of.get(row)

    def ref_count(self, row: int) -> int:
        return self._columns.ref_count[row]

    def oldest(self, count: int) -> list[int]:
        """Return up to `count` cached ledger rows, in the order in which they are evicted."""
        return [row for row, _ in zip(self._eviction_order.idle, range(count), strict=False)]

    def allocate(self, count: int, owners: Sequence[int] | int) -> list[int]:
        """Return `count` free ledger rows, at most `num_free`, with one reference each.

        `owners` are the numbers of the requests that wrote the content, one per row or one for all.
        """
        rows = [self._free.pop() for _ in range(count)]
        for row, owner in zip(rows, [owners] * count if isinstance(owners, int) else owners, strict=True):
            self._activate(row, owner)
        return rows

    def adopt(self, rows: Sequence[int]) -> None:
        """Allocate these ledger rows, which must be free, with one reference each."""
        adopted = set(rows)
        self._free = [row for row in self._free if row not in adopted]
        for row in rows:
            self._activate(row, 0)

    def fill(
        self, rows: Sequence[int], filled: Sequence[int], prefixes: Sequence[Prefix | None], groups: Sequence[int]
    ) -> None:
        """Record the content of newly allocated ledger rows: number of used token slots, prefix and KV group of each.

        Rows with a prefix enter the index, unless it has the prefix already.
        """
        columns = self._columns
        for row, count, prefix, group in zip(rows, filled, prefixes, groups, strict=True):
            columns.filled[row] = count
            columns.group[row] = group
            if prefix is not None and self._row_of.setdefault(prefix.digest, row) == row:
                self._prefix_of[row] = prefix
                columns.hash[row] = published_hash(prefix.digest)
                columns.parent[row] = prefix.published_parent
                if self._pool.cache_log is not None:
                    self._pool.cache_log.record_stored(prefix, self._tier)

    def acquire(self, rows: Sequence[int]) -> None:
        """Add a reference to cached or active ledger rows, which must be distinct."""
        columns, step = self._columns, self._pool.step
        for row in rows:
            if row in self._eviction_order:
                self._eviction_order.remove(row)
            columns.ref_count[row] += 1
            columns.state[row] = BlockState.ACTIVE
            columns.last_used_step[row] = step
            self._pool.changed_rows.add_one(row)

    def release(self, rows: Sequence[int]) -> None:
        """Remove a reference to distinct ledger rows.

        A row without references becomes cached if it is in the index, otherwise free.
        """
        columns, step = self._columns, self._pool.step
        for row in rows:
            count = columns.ref_count[row] - 1
            assert count >= 0, f"slot {row} was released more often than held"
            columns.ref_count[row] = count
            columns.last_used_step[row] = step
            self._pool.changed_rows.add_one(row)
            if count == 0 and row in self._prefix_of:
                columns.state[row] = BlockState.CACHED
                self._eviction_order.add_one(row)
            elif count == 0:
                self._clear(row)

    def refresh(self, row: int) -> None:
        """Make a cached ledger row the last to be evicted, because it was used. Has no effect on active rows."""
        if row in self._eviction_order:
            self._eviction_order.refresh(row)

    def drop_prefix(self, row: int) -> Prefix | None:
        """Remove the prefix of a ledger row from the index, and free the row if it has no references.

        Returns the prefix, or None if the row has none.
        """
        prefix = self._prefix_of.pop(row, None)
        if prefix is not None:
            del self._row_of[prefix.digest]
            self._columns.hash[row] = 0
            self._columns.parent[row] = 0
            if self._pool.cache_log is not None:
                self._pool.cache_log.record_removed([prefix], self._tier)
        if row in self._eviction_order:
            self._eviction_order.remove(row)
            self._clear(row)
        self._pool.changed_rows.add_one(row)
        return prefix

    def clear(self) -> None:
        for row in list(self._prefix_of):
            self.drop_prefix(row)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the rows agree with each other and with `tables`, which contain rows of any
        tier.
        """
        ledger = self._pool.ledger.part(self.first, self.first + self.count)
        num_references = np.zeros(self.count, np.int64)
        for table in tables:
            own_slots = [row - self.first for row in table if row in self]
            assert len(set(own_slots)) == len(own_slots), f"a slot is held twice by one table: {own_slots}"
            num_references[own_slots] += 1
        assert (num_references == ledger.ref_count).all(), (
            f"references of slots disagree: {np.flatnonzero(num_references != ledger.ref_count)}"
        )
        expected = np.full(self.count, BlockState.ACTIVE, np.uint8)
        expected[[row - self.first for row in self._free]] = BlockState.FREE
        expected[[row - self.first for row in self._eviction_order.idle]] = BlockState.CACHED
        assert (expected == ledger.state).all(), f"states disagree: {np.flatnonzero(expected != ledger.state)}"
        free = ledger.state == BlockState.FREE
        assert len(self._free) == len(set(self._free)) == free.sum(), "a slot is free twice"
        assert ((ledger.ref_count > 0) == (ledger.state == BlockState.ACTIVE)).all(), "a held slot is not active"
        assert not ledger.filled[free].any(), "a free slot is filled"
        assert (ledger.owner[free] == NO_OWNER).all(), "a free slot has an owner"
        parents = {row: int(self._columns.parent[row]) for row in self._prefix_of}
        assert parents == {row: p.published_parent for row, p in self._prefix_of.items()}, "a slot has another parent"
        assert not ledger.parent[ledger.hash == 0].any(), "a slot that is not hashed has a parent"
        assert {row: p.digest for row, p in self._prefix_of.items()} == {r: d for d, r in self._row_of.items()}
        assert {row - self.first for row in self._prefix_of} == set(np.flatnonzero(ledger.hash).tolist())
        self._eviction_order.check(self.first, self.first + self.count)
        assert set(self._eviction_order.idle) <= set(self._prefix_of), "a slot is cached and cannot be found"

    def _activate(self, row: int, owner: int) -> None:
        columns = self._columns
        columns.state[row] = BlockState.ACTIVE
        columns.ref_count[row] = 1
        columns.owner[row] = owner
        columns.last_used_step[row] = self._pool.step
        self._pool.changed_rows.add_one(row)

    def _clear(self, row: int) -> None:
        columns = self._columns
        columns.state[row] = BlockState.FREE
        columns.owner[row] = NO_OWNER
        columns.filled[row] = 0
        columns.group[row] = 0
        self._free.append(row)


class _Columns:
    """Columns of the ledger as memoryviews. Rows are changed one or two at a time, for which numpy is 10 times
    slower.
    """

    __slots__ = ("filled", "group", "hash", "last_used_step", "owner", "parent", "ref_count", "state")

    def __init__(self, ledger: Ledger) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(ledger, name).data)

    filled: memoryview[int]
    group: memoryview[int]
    hash: memoryview[int]
    last_used_step: memoryview[int]
    owner: memoryview[int]
    parent: memoryview[int]
    ref_count: memoryview[int]
    state: memoryview[int]
