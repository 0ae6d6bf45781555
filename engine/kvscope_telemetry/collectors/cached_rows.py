"""Assigns ledger rows to the blocks of KV events, which identify blocks by hash and give no location.

Owns the map from blocks to rows; the ledger belongs to a `CacheState`. The rows of a tier are contiguous. A block that
is in several media or KV groups has a row in each. An engine may have several physical copies of a block (vLLM does if
two requests compute the same text) and reports each copy that is added or removed: the copies share a row until the
last one is removed. Independent of messages and clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.collectors.kv_groups import Groups
from kvscope_telemetry.collectors.row_allocator import RowAllocator, medium_name, tier_of
from kvscope_telemetry.kv_events.batches import HASH_MASK, AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvscope_telemetry.ledger import COLUMNS, BlockState, Column, Ledger, Tier
from kvscope_telemetry.tier_rows import BLOCK_TIERS, TierRows

MAX_ROWS: Final = 4 << 20
"""Maximum number of ledger rows. The snapshot of a larger ledger would exceed the maximum size of a message."""
FIRST_ROWS: Final = {Tier.HBM: 4096, Tier.HOST: 1024, Tier.DISK: 1024, Tier.UNKNOWN: 1024}
"""Initial number of ledger rows per tier, if the server does not report its number of blocks. Doubled when full."""
MAX_UNKNOWN_MEDIA: Final = 8
_Key = tuple[str, int | None]


@dataclass(slots=True)
class _Table:
    """Maps the blocks of one medium and KV group to their rows."""

    rows: dict[int, int] = field(default_factory=dict)
    """Map from a block hash to its row within the tier."""
    num_more: dict[int, int] = field(default_factory=dict)
    """Map from a block hash to its number of physical copies in addition to the first; absent for a single copy."""
    doubted: set[int] = field(default_factory=set)
    """Block hashes with an unknown number of copies, because events were lost. The next reported copy counts as
    the first.
    """

    def doubt(self) -> None:
        self.num_more.clear()
        self.doubted = set(self.rows)

    def add_copy(self, block_hash: int) -> None:
        if block_hash in self.doubted:
            self.doubted.discard(block_hash)
        else:
            self.num_more[block_hash] = self.num_more.get(block_hash, 0) + 1

    def remove_copy(self, block_hash: int) -> int | None:
        """Remove one copy of a block. If it was the last copy, returns the block's row, which is then empty.
        Returns None if copies remain or the hash is unknown.
        """
        num_more = self.num_more.pop(block_hash, 0)
        if num_more:
            if num_more > 1:
                self.num_more[block_hash] = num_more - 1
            return None
        self.doubted.discard(block_hash)
        return self.rows.pop(block_hash, None)


class CachedRows:
    """Ledger rows of all cached blocks of one data-parallel rank.

    `num_hbm`, `num_host`: initial numbers of rows for HBM and host memory; 0 if the server does not report them.
    """

    def __init__(self, num_hbm: int = 0, num_host: int = 0, *, clears_lower_tiers: bool = True) -> None:
        self._clears_lower_tiers = clears_lower_tiers
        self.num_rows = dict.fromkeys(BLOCK_TIERS, 0) | {Tier.HBM: num_hbm or FIRST_ROWS[Tier.HBM], Tier.HOST: num_host}
        """Number of rows that the next ledger needs, by tier."""
        self.num_unplaced = 0
        """Number of blocks since the last `clear` that got no ledger row, because all `MAX_ROWS` rows were in use."""
        self.num_stored = dict.fromkeys(BLOCK_TIERS, 0)
        self.num_removed = dict.fromkeys(BLOCK_TIERS, 0)
        """Number of removed blocks since the start, by tier. Blocks removed by `clear` are not counted."""
        self.unknown_media: list[str] = []
        """Names of media whose tier is unknown, in order of appearance; at most `MAX_UNKNOWN_MEDIA`."""
        self.groups = Groups()
        self.ledger = Ledger(0)
        """The ledger passed to the last `lay_out`."""
        self._num_laid_out = dict.fromkeys(BLOCK_TIERS, 0)  # number of its rows
        self._tables: dict[_Key, _Table] = {}  # by medium and group
        self._rows = {tier: RowAllocator() for tier in BLOCK_TIERS}
        for tier, rows in self._rows.items():
            rows.size = self.num_rows[tier]

    @property
    def num_held(self) -> int:
        return sum(rows.num_held for rows in self._rows.values())

    @property
    def must_change(self) -> bool:
        """Whether the ledger's size must change. If so, the caller must call `lay_out` with a new ledger."""
        return self.num_rows != self._num_laid_out

    def reserve(self, tier: Tier, num_rows: int) -> None:
        """Increase the rows of a tier to the number of blocks that the server reports. Never decreases them."""
        max_rows = MAX_ROWS - sum(count for other, count in self.num_rows.items() if other != tier)
        self.num_rows[tier] = max(self.num_rows[tier], min(num_rows, max_rows))

    def shrink(self, tier: Tier, num_rows: int) -> bool:
        """Reduce a tier to `num_rows` rows.

        Returns False, and changes nothing, if the tier has no more than `num_rows`, or if rows beyond that were ever in
        use.
        """
        if not self._rows[tier].num_used <= num_rows < self.num_rows[tier]:
            return False
        self.num_rows[tier] = self._rows[tier].size = num_rows
        return True

    def apply(self, event: KvEvent) -> None:
        """Apply a KV event. Storing a cached block adds a copy to its row; removing an unknown block has no effect."""
        if isinstance(event, BlockStored):
            self._store(event)
        elif isinstance(event, BlockRemoved):
            self._remove(event)
        else:
            assert isinstance(event, AllBlocksCleared), f"{event} is no KV event"
            self.clear(None if self._clears_lower_tiers else Tier.HBM)

    def clear(self, only: Tier | None = None) -> None:
        """Remove all blocks, or the blocks of one tier."""
        for key, table in list(self._tables.items()):
            tier = tier_of(key[0])
            if only in (None, tier):
                self._rows[tier].free(list(table.rows.values()))
                del self._tables[key]
        self.num_unplaced = 0

    def doubt_copies(self) -> None:
        """Mark the number of copies of each block as unknown, because events were lost."""
        for table in self._tables.values():
            table.doubt()

    def lay_out(self, ledger: Ledger) -> None:
        """Write all rows to `ledger`, which must be empty and have `num_rows` rows, and use it from then on."""
        layout = TierRows(self.num_rows)
        layout.write_tiers(ledger)
        for tier, rows in self._rows.items():
            start = layout[tier].start
            num_kept, rows.size = min(self._num_laid_out[tier], self.num_rows[tier]), self.num_rows[tier]
            for name in COLUMNS:
                getattr(ledger, name)[start : start + num_kept] = getattr(self.ledger, name)[
                    rows.start : rows.start + num_kept
                ]
            rows.start = start
        ids, columns = self.drain_changes()
        for name, values in columns.items():
            getattr(ledger, name)[ids] = values
        self.ledger, self._num_laid_out = ledger, dict(self.num_rows)

    def drain_changes(self) -> tuple[npt.NDArray[np.uint32], dict[str, Column]]:
        """Return the ledger rows that changed since the last call (ascending, without duplicates), and the
        columns to write for them.
        """
        ids, changes = zip(*(rows.drain_changes() for rows in self._rows.values()), strict=True)
        columns = {name: np.concatenate([change[name] for change in changes]) for name in changes[0]}
        is_held = columns["hash"] != 0
        columns["state"] = np.where(is_held, np.uint8(BlockState.CACHED), np.uint8(BlockState.FREE))
        columns["filled"] = np.where(is_held, self.groups.sizes[columns["group"]], np.uint16(0))
        return np.concatenate(ids), columns

    def hash_in_row(self, row: int) -> int:
        """Return the hash in a ledger row; 0 if the row is empty or does not exist."""
        is_row = 0 <= row < self.ledger.num_blocks and self.ledger.state[row] == BlockState.CACHED
        return int(self.ledger.hash[row]) if is_row else 0

    def _store(self, event: BlockStored) -> None:
        medium = medium_name(event.medium)
        table = self._tables.setdefault((medium, event.group_idx), _Table())
        tier = tier_of(medium)
        if tier is Tier.UNKNOWN and medium not in self.unknown_media and len(self.unknown_media) < MAX_UNKNOWN_MEDIA:
            self.unknown_media.append(medium)
        rows, group = self._rows[tier], self.groups.number_of(event)
        parent = (event.parent_block_hash or HASH_MASK) if event.parent_block_hash is not None else 0
        for block_hash in event.block_hashes:
            block_hash = block_hash or HASH_MASK
            if block_hash in table.rows:
                if tier is Tier.HBM:  # other media hold a block once, even if it is reported repeatedly
                    table.add_copy(block_hash)
            else:
                row = rows.allocate(block_hash, parent, group)
                if row is None:
                    row = self._allocate_beyond(tier, block_hash, parent, group)
                if row is not None:
                    table.rows[block_hash] = row
                    self.num_stored[tier] += 1
            parent = block_hash

    def _allocate_beyond(self, tier: Tier, block_hash: int, parent: int, group: int) -> int | None:
        """Allocate a row after the last row of the current ledger; None if `MAX_ROWS` is reached. The row is
        written to the ledger by the next `lay_out`, which needs a larger ledger.
        """
        rows = self._rows[tier]
        if rows.size >= self.num_rows[tier]:
            self.reserve(tier, max(2 * self.num_rows[tier], FIRST_ROWS[tier]))
        rows.size = self.num_rows[tier]
        row = rows.allocate(block_hash, parent, group)
        self.num_unplaced += row is None
        return row

    def _remove(self, event: BlockRemoved) -> None:
        medium = medium_name(event.medium)
        tables = [self._tables.get((medium, event.group_idx))]
        if tables == [None] and event.group_idx is None:  # the event has no group, so it applies to all
            tables = [table for (other, _), table in self._tables.items() if other == medium]
        for table in filter(None, tables):
            freed = [
                row
                for block_hash in event.block_hashes
                if (row := table.remove_copy(block_hash or HASH_MASK)) is not None
            ]
            tier = tier_of(medium)
            self._rows[tier].free(freed)
            self.num_removed[tier] += len(freed)
