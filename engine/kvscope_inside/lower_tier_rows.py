"""Ledger rows of blocks that a host engine stores below its KV pool, in host memory or on disk.

A prompt can hit a block only after its copy is complete. Until then its row is ACTIVE without a hash; the hash, parent
and number of tokens are stored here. Used on the publishing thread only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.producer.cache_state import CacheState

Rows = npt.NDArray[np.int64]
_NO_ROWS: Final[Rows] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Blocks that are copied to a lower tier together. Each array has one value per row, or one value for all rows."""

    rows: Sequence[int] | Rows
    hash: npt.ArrayLike
    parent: npt.ArrayLike
    owner: npt.ArrayLike
    filled: npt.ArrayLike
    """Number of tokens in each block. If it is 0, the block's row stays free."""
    group: int = 0


class LowerTierRows:
    """Updates the ledger rows of blocks below the pool, which are those from row `first` on."""

    def __init__(self, state: CacheState) -> None:
        self.first = state.hello.cache.num_blocks
        self._state = state
        self._storing: dict[Hashable, StoredBlocks] = {}

    def begin_store(self, key: Hashable, blocks: StoredBlocks, step: int) -> None:
        """Mark `blocks` as ACTIVE while they are copied to the lower tier.

        `end_store` or `cancel_store` must be called later with the same `key`.
        """
        self._storing[key] = blocks
        self._state.set_blocks(
            blocks.rows,
            state=BlockState.ACTIVE,
            ref_count=1,
            owner=blocks.owner,
            group=blocks.group,
            filled=0,
            hash=0,
            parent=0,
            prefix_hits=0,
            last_used_step=step,
        )

    def end_store(self, key: Hashable, step: int) -> Rows:
        """Publish that the copy begun with `key` is complete. Returns the rows that prompts can hit from then on."""
        blocks = self._storing.pop(key, None)
        if blocks is None:
            return _NO_ROWS
        rows = np.asarray(blocks.rows, np.int64)
        is_copied = self._state.ledger.state[rows] == BlockState.ACTIVE  # otherwise it was evicted in the meantime
        rows, filled = rows[is_copied], np.broadcast_to(blocks.filled, is_copied.shape)[is_copied]
        self._state.set_blocks(
            rows,
            state=BlockState.CACHED,
            ref_count=0,
            hash=np.broadcast_to(np.asarray(blocks.hash, np.uint64), is_copied.shape)[is_copied],
            parent=np.broadcast_to(np.asarray(blocks.parent, np.uint64), is_copied.shape)[is_copied],
            filled=filled,
            last_used_step=step,
        )
        self._state.free_blocks(rows[filled == 0])
        stored: Rows = rows[filled > 0]
        self._state.add_moves("saved", stored.tolist())
        self._state.count(offloaded_blocks=stored.size)
        return stored

    def cancel_store(self, key: Hashable) -> None:
        blocks = self._storing.pop(key, None)
        if blocks is not None:
            self._state.free_blocks(blocks.rows)

    def begin_load(self, rows: Iterable[int] | Rows, step: int) -> Rows:
        """Add a reference to the blocks in `rows`, which the host engine begins to copy into the pool. Free
        rows are skipped. Returns the other rows.
        """
        non_free = self.non_free(rows)
        self._state.begin_read(non_free, step)
        return non_free

    def end_load(self, rows: Iterable[int] | Rows, step: int) -> None:
        self._state.end_read(self.non_free(rows), step)

    def evict(self, rows: Iterable[int] | Rows) -> tuple[Rows, list[int]]:
        """Free blocks. Returns the rows that were not free before, and their hashes (0 for a block without a hash)."""
        non_free = self.non_free(rows)
        hashes: list[int] = self._state.ledger.hash[non_free].tolist()
        self._state.free_blocks(non_free)
        return non_free, hashes

    def clear(self) -> Rows:
        self._storing.clear()
        non_free = self.non_free(np.arange(self.first, self._state.ledger.num_blocks))
        self._state.free_blocks(non_free)
        return non_free

    def non_free(self, rows: Iterable[int] | Rows) -> Rows:
        row_ids = np.asarray(rows if isinstance(rows, np.ndarray) else list(rows), np.int64)
        non_free: Rows = row_ids[self._state.ledger.state[row_ids] != BlockState.FREE]
        return non_free
