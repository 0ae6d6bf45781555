"""Rows of blocks below the pool, and the order in which blocks of the pool are allocated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.inside.conftest import hello_of

from kvscope_inside import CacheState
from kvscope_inside.lower_tier_rows import LowerTierRows, StoredBlocks
from kvscope_inside.reuse_order import FreeBlockQueue
from kvscope_telemetry.ledger import BlockState

NUM_BLOCKS = 8


class StoredTier:
    """A host tier of four blocks below a pool."""

    def __init__(self) -> None:
        hello = hello_of(NUM_BLOCKS)
        self.state = CacheState(replace(hello, cache=replace(hello.cache, num_host_blocks=4)))
        self.ledger, self.rows = self.state.ledger, LowerTierRows(self.state)

    def begin_store(self, key: str, rows: list[int], filled: list[int]) -> None:
        blocks = StoredBlocks(rows, [row + 100 for row in rows], [0] * len(rows), 3, filled)
        self.rows.begin_store(key, blocks, step=1)


@pytest.fixture
def tier() -> StoredTier:
    return StoredTier()


def test_block_is_cached_only_after_its_copy_is_complete(tier: StoredTier) -> None:
    tier.begin_store("a", [8, 9], [4, 0])
    assert tier.ledger.state[8:10].tolist() == [BlockState.ACTIVE, BlockState.ACTIVE]
    assert not tier.ledger.hash[8:10].any()
    assert tier.rows.end_store("a", step=2).tolist() == [8]
    assert tier.ledger.state[8:10].tolist() == [BlockState.CACHED, BlockState.FREE]
    assert (int(tier.ledger.hash[8]), int(tier.ledger.filled[8]), int(tier.ledger.owner[8])) == (108, 4, 3)
    assert tier.rows.end_store("a", step=3).size == 0, "a store was completed twice"


def test_host_blocks_are_freed_if_their_copy_fails_or_they_are_dropped_before_it_ends(tier: StoredTier) -> None:
    tier.begin_store("failed", [8], [4])
    tier.rows.cancel_store("failed")
    tier.begin_store("dropped", [9, 10], [4, 4])
    tier.state.free_blocks([9])
    assert tier.rows.end_store("dropped", step=2).tolist() == [10]
    assert tier.ledger.state[8:11].tolist() == [BlockState.FREE, BlockState.FREE, BlockState.CACHED]
    assert tier.state.totals["offloaded_blocks"] == 1


def test_loaded_block_is_held_until_its_copy_is_complete_and_evicted_with_its_hash(tier: StoredTier) -> None:
    tier.begin_store("a", [8], [4])
    tier.rows.end_store("a", step=2)
    assert tier.rows.begin_load([8, 9], step=3).tolist() == [8]
    assert (int(tier.ledger.ref_count[8]), int(tier.ledger.prefix_hits[8])) == (1, 1)
    tier.rows.end_load([8, 9], step=4)
    assert tier.ledger.state[8] == BlockState.CACHED
    rows, hashes = tier.rows.evict([8, 9])
    assert (rows.tolist(), hashes) == ([8], [108])
    assert tier.rows.clear().size == 0


def test_eviction_order_is_kept_when_its_numbers_run_out(monkeypatch: Any) -> None:
    monkeypatch.setattr("kvscope_inside.reuse_order.MIDDLE", NUM_BLOCKS)
    monkeypatch.setattr("kvscope_inside.reuse_order.MAX_ORDER", 3 * NUM_BLOCKS)
    state = CacheState(hello_of(NUM_BLOCKS))
    order, expected = FreeBlockQueue(state), list(range(NUM_BLOCKS))
    for turn in range(40):
        taken = [expected.pop(0), expected.pop(0)]
        state.set_blocks(taken, eviction_order=0)
        if turn % 3:
            order.append(taken)
            expected += taken
        else:
            order.prepend(taken)
            expected = taken + expected
        queued = state.ledger.eviction_order
        assert np.argsort(queued).tolist() == expected
        assert queued.all()
