"""The rows of a ledger by tier: order, positions and lookups agree."""

from __future__ import annotations

import numpy as np
import pytest

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_telemetry.ledger import Ledger, Tier
from kvscope_telemetry.messages.telemetry import CacheInfo
from kvscope_telemetry.tier_rows import TIER_ORDER, TierRows

ALL = {Tier.HBM: 8, Tier.HOST: 4, Tier.DISK: 3, Tier.UNKNOWN: 2, Tier.STATES: 5, Tier.HOST_STATES: 1}


def test_every_tier_has_a_position_in_the_ledger():
    assert set(TIER_ORDER) == set(Tier)


@pytest.mark.parametrize("without", [(), (Tier.HOST,), (Tier.DISK, Tier.UNKNOWN), (Tier.STATES, Tier.HOST_STATES)])
def test_tier_found_for_each_block_equals_the_tier_column_of_the_ledger(without):
    rows = TierRows({tier: size for tier, size in ALL.items() if tier not in without})
    ledger = Ledger(rows.num_rows)
    rows.write_tiers(ledger)
    assert list(rows.present) == [tier for tier in TIER_ORDER if tier not in without]
    assert [rows.tier_of(row) for row in range(rows.num_rows)] == ledger.tier.tolist()
    assert rows.tiers_of(np.arange(rows.num_rows)).tolist() == ledger.tier.tolist()
    assert rows.count(np.arange(rows.num_rows)) == {tier: ALL[tier] for tier in rows.present}
    assert all((ledger.tier[part.start : part.stop] == tier).all() for tier, part in rows.present.items())


def test_tier_without_blocks_is_an_empty_range_where_its_blocks_would_be():
    rows = TierRows({Tier.HBM: 8, Tier.DISK: 3})
    assert rows[Tier.HOST] == range(8, 8)
    assert rows[Tier.DISK] == range(8, 11)
    assert rows.first_state == rows.num_rows == 11


def test_gpu_tier_without_blocks_is_present_as_an_empty_range():
    assert TierRows({}).present == {Tier.HBM: range(0)}


def test_block_numbers_past_the_last_belong_to_an_unknown_tier():
    rows = TierRows({Tier.HBM: 8, Tier.STATES: 2})
    assert rows.tier_of(10) is Tier.UNKNOWN
    assert rows.tiers_of(np.array([7, 8, 10])).tolist() == [Tier.HBM, Tier.STATES, Tier.UNKNOWN]
    assert rows.count(np.array([10])) == {Tier.HBM: 0, Tier.STATES: 0}


def test_block_pool_and_hello_message_assign_blocks_to_the_same_tiers():
    pool = BlockPool(8, 16, other_tiers={Tier.HOST: 4, Tier.DISK: 3, Tier.STATES: 5, Tier.HOST_STATES: 1})
    cache = CacheInfo(
        num_blocks=8, block_size=16, num_host_blocks=4, num_disk_blocks=3, num_states=5, num_host_states=1
    )
    assert pool.rows_by_tier.present == cache.rows_by_tier.present
    assert cache.rows_by_tier.tiers_of(np.arange(cache.num_rows)).tolist() == pool.ledger.tier.tolist()


def test_size_of_a_ledger_entry_is_that_of_a_block_or_of_a_recurrent_state():
    cache = CacheInfo(num_blocks=8, block_size=16, block_bytes=64, num_host_blocks=4)
    assert cache.row_bytes(Tier.HOST) == 64
    assert cache.row_bytes(Tier.STATES) == 0
