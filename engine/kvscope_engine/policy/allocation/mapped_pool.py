"""Block pool of the policy `virtual`: each ledger row is a virtual block address, and only some are backed by memory.

Owns the set of rows that have memory (`mapped_rows`). It has no prefix cache, and callers choose the rows to allocate.
"""

from __future__ import annotations

import numpy as np

from kvscope_engine.policy.allocation.address_space import AddressSpace
from kvscope_engine.policy.allocation.mapped_rows import MappedRows
from kvscope_engine.policy.allocation.page_slots import PageSlots
from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.kv_cache.free_list import Ids
from kvscope_telemetry.ledger import BlockState, Tier


class MappedPool(BlockPool):
    """Pool with one ledger row per block address of `space`. No row has memory before the first `map_rows`."""

    def __init__(self, space: AddressSpace, block_size: int, *, num_states: int = 0) -> None:
        self._rows = MappedRows(space.num_rows)
        tiers = {Tier.STATES: num_states}
        super().__init__(space.num_rows, block_size, prefix_caching=False, other_tiers=tiers, free=self._rows)
        self.page_slots = PageSlots(space)
        """Number of page groups of each slot. The policy updates it."""
        self._set_state(0, space.num_rows, BlockState.UNMAPPED)

    def map_rows(self, first: int, count: int) -> None:
        """Mark the `count` ledger rows from `first` on, which must be unmapped, as mapped and free."""
        self._rows.map(self._set_state(first, count, BlockState.FREE))

    def unmap_rows(self, first: int, count: int) -> None:
        """Mark the `count` ledger rows from `first` on, which must be free, as unmapped."""
        self._rows.unmap(self._set_state(first, count, BlockState.UNMAPPED))

    def allocate_mapped(self, first: int, count: int, owner: int) -> list[int]:
        """Allocate the `count` free blocks from `first` on for request `owner`, empty and with one reference each."""
        ids = np.arange(first, first + count, dtype=np.int64)
        self._rows.allocate(ids)
        self._activate(ids, owner)
        return list(range(first, first + count))

    def _set_state(self, first: int, count: int, state: BlockState) -> Ids:
        ids = np.arange(first, first + count, dtype=np.int64)
        self.ledger.state[ids] = state
        self.changed_rows.add(ids)
        return ids


def page_slots_of(pool: BlockPool) -> PageSlots | None:
    """Return the page-group counts of a `MappedPool`; None for every other pool."""
    return pool.page_slots if isinstance(pool, MappedPool) else None
