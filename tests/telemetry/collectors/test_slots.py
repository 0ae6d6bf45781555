"""Rows assigned to reported blocks: copies, unknown removals, media, groups and sizes, compared with a model."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from kvscope_telemetry.collectors.cached_rows import MAX_ROWS, CachedRows
from kvscope_telemetry.collectors.row_allocator import tier_of
from kvscope_telemetry.kv_events.batches import HASH_MASK, AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvscope_telemetry.ledger import BlockState, Ledger, Tier


def stored(
    *hashes: int, parent: int | None = None, medium: str | None = "GPU", group: int | None = None
) -> BlockStored:
    return BlockStored(hashes, parent, tuple(range(4 * len(hashes))), 4, medium=medium, group_idx=group)


def apply_pending(slots: CachedRows) -> None:
    if slots.must_change:
        slots.lay_out(Ledger(sum(slots.num_rows.values())))
    ids, columns = slots.drain_changes()
    for name, values in columns.items():
        getattr(slots.ledger, name)[ids] = values


def held(slots: CachedRows, tier: Tier = Tier.HBM) -> list[tuple[int, int]]:
    """Hashes and parents, as the ledger has them."""
    ledger = slots.ledger
    rows = np.flatnonzero((ledger.state == BlockState.CACHED) & (ledger.tier == tier))
    assert (ledger.filled[rows] == 4).all()
    assert np.array_equal(ledger.hash != 0, ledger.state == BlockState.CACHED)
    return sorted(zip(ledger.hash[rows].tolist(), ledger.parent[rows].tolist(), strict=True))


def test_kv_event_for_a_known_block_or_an_unknown_removal_changes_nothing() -> None:
    slots = CachedRows(8)
    slots.apply(stored(1, 2))
    apply_pending(slots)
    before = slots.ledger.hash.copy()
    slots.apply(stored(1, 2))
    slots.apply(BlockRemoved((99,), "GPU"))
    slots.apply(BlockRemoved((1,), "CPU"))
    assert not slots.drain_changes()[0].size
    assert np.array_equal(before, slots.ledger.hash)
    assert held(slots) == [(1, 0), (2, 1)]


def test_block_stored_in_several_media_and_kv_groups_is_counted_in_each() -> None:
    slots = CachedRows(8)
    for event in (
        stored(1, group=0),
        stored(1, group=1),
        stored(1, medium="CPU", group=0),
        stored(1, medium="STORAGE"),
    ):
        slots.apply(event)
    apply_pending(slots)
    assert (held(slots), held(slots, Tier.HOST), held(slots, Tier.DISK)) == ([(1, 0)] * 2, [(1, 0)], [(1, 0)])
    slots.apply(BlockRemoved((1,), "GPU", 1))
    apply_pending(slots)
    assert (held(slots), held(slots, Tier.HOST)) == ([(1, 0)], [(1, 0)])


def test_block_stored_several_times_is_removed_with_its_last_copy() -> None:
    slots = CachedRows(8)
    for _ in range(3):
        slots.apply(stored(7, group=0))
    slots.apply(stored(7, group=1))
    for num_left in (1, 1, 0):
        slots.apply(BlockRemoved((7,), "GPU", 0))
        apply_pending(slots)
        assert len(held(slots)) == num_left + 1
    slots.apply(BlockRemoved((7,), "GPU", 0))
    apply_pending(slots)
    assert held(slots) == [(7, 0)]
    assert slots.num_removed[Tier.HBM] == 1


def test_block_reported_again_after_an_event_loss_is_counted_once() -> None:
    slots = CachedRows(8)
    slots.apply(stored(1, 2))
    slots.apply(stored(1))
    slots.doubt_copies()
    slots.apply(stored(1))
    slots.apply(stored(2))
    slots.apply(stored(2))
    slots.apply(BlockRemoved((1, 2), "GPU"))
    apply_pending(slots)
    assert held(slots) == [(2, 1)]


@pytest.mark.parametrize(
    ("tier", "media"),
    [
        (Tier.HBM, (None, "GPU", "gpu", "cuda:0")),
        (Tier.HOST, ("CPU", "cpu", "CPU_PINNED", "CPU_TIER1", "Host", "LocalCPUBackend")),
        (Tier.DISK, ("DISK", "disk", "local_disk", "file", "nvme0", "storage_nixl", "EXTERNAL", "s3", "remote")),
        (Tier.UNKNOWN, ("FRIDGE", "")),
    ],
)
def test_media_names_map_to_tiers_in_any_case(tier: Tier, media: tuple[str | None, ...]) -> None:
    assert {tier_of(medium) for medium in media} == {tier}


def test_block_is_found_however_its_medium_is_written() -> None:
    slots = CachedRows(8)
    slots.apply(stored(1, medium="cpu"))
    slots.apply(BlockRemoved((1,), "CPU"))
    slots.apply(stored(2, medium=None))
    slots.apply(BlockRemoved((2,), "gpu"))
    apply_pending(slots)
    assert slots.num_held == 0


def test_block_in_an_unknown_storage_medium_is_put_into_an_unknown_tier() -> None:
    slots = CachedRows(8)
    slots.apply(stored(1, medium="STORAGE"))
    slots.apply(stored(1, medium="FRIDGE"))
    apply_pending(slots)
    assert (held(slots, Tier.DISK), held(slots, Tier.UNKNOWN)) == ([(1, 0)], [(1, 0)])
    assert slots.unknown_media == ["fridge"]


def test_removal_without_a_group_removes_the_block_from_all_groups() -> None:
    slots = CachedRows(8)
    slots.apply(stored(1, group=0))
    slots.apply(stored(1, group=1))
    slots.apply(BlockRemoved((1,), None))
    apply_pending(slots)
    assert held(slots) == []


def test_space_of_a_removed_block_is_reused_for_the_next_stored_block() -> None:
    slots = CachedRows(2)
    apply_pending(slots)
    for number in range(1, 100):
        slots.apply(stored(number))
        slots.apply(BlockRemoved((number,), "GPU"))
    slots.apply(stored(100, 101))
    assert not slots.must_change
    apply_pending(slots)
    assert held(slots) == [(100, 0), (101, 100)]


def test_tiers_grow_and_keep_their_blocks() -> None:
    slots = CachedRows(2)
    slots.apply(stored(*range(1, 6)))
    assert slots.must_change
    apply_pending(slots)
    assert len(held(slots)) == 5
    slots.apply(stored(7, medium="CPU"))
    apply_pending(slots)
    slots.apply(stored(*range(100, 100 + slots.num_rows[Tier.HBM])))
    assert slots.must_change
    apply_pending(slots)
    assert held(slots, Tier.HOST) == [(7, 0)]


def test_tier_can_shrink_to_the_number_of_stored_blocks() -> None:
    slots = CachedRows()
    slots.apply(stored(1, 2))
    apply_pending(slots)
    assert not slots.shrink(Tier.HBM, 1)
    assert slots.shrink(Tier.HBM, 2)
    apply_pending(slots)
    assert slots.ledger.num_blocks == 2
    assert held(slots) == [(1, 0), (2, 1)]


def test_number_of_blocks_tracked_from_kv_events_is_bounded() -> None:
    slots = CachedRows(4)
    slots.reserve(Tier.HBM, 1 << 40)
    slots.reserve(Tier.HOST, 1 << 40)
    apply_pending(slots)
    assert slots.ledger.num_blocks == MAX_ROWS


def test_block_with_hash_zero_is_tracked_like_others() -> None:
    slots = CachedRows(4)
    slots.apply(stored(0, 5))
    apply_pending(slots)
    assert held(slots) == [(5, HASH_MASK), (HASH_MASK, 0)]
    slots.apply(BlockRemoved((0,), "GPU"))
    apply_pending(slots)
    assert held(slots) == [(5, HASH_MASK)]


def test_blocks_tracked_from_random_kv_events_match_a_counting_model() -> None:
    chance = random.Random(7)
    slots, model = CachedRows(4), {"GPU": Counter[int](), "CPU": Counter[int]()}
    for _ in range(4000):
        medium, number = chance.choice(("GPU", "CPU")), chance.randrange(1, 300)
        event: KvEvent
        match chance.randrange(20):
            case 0:
                event = AllBlocksCleared()
                model = {"GPU": Counter(), "CPU": Counter()}
            case kind if kind < 12:
                event = stored(number, number + 1, medium=medium)
                model[medium].update((number, number + 1))
            case _:
                event = BlockRemoved((number,), medium)
                model[medium].subtract((number,))
                if medium == "CPU":  # the block is there once, however often it is reported
                    model[medium][number] = 0
                model[medium] = +model[medium]
        slots.apply(event)
        if chance.randrange(10) == 0:
            apply_pending(slots)
            assert [each for each, _ in held(slots)] == sorted(model["GPU"])
            assert [each for each, _ in held(slots, Tier.HOST)] == sorted(model["CPU"])
            assert slots.num_held == sum(map(len, model.values()))


def test_reset_of_the_prefix_cache_keeps_offloaded_blocks_if_the_engine_keeps_them() -> None:
    """As vLLM (issue 57296): its event about a reset covers the device alone."""
    slots, emptied = CachedRows(8, clears_lower_tiers=False), CachedRows(8)
    for one in (slots, emptied):
        for event in (stored(1), stored(2), stored(1, medium="CPU"), AllBlocksCleared()):
            one.apply(event)
        apply_pending(one)
    assert (held(slots), held(slots, Tier.HOST)) == ([], [(1, 0)])
    assert (held(emptied), held(emptied, Tier.HOST)) == ([], [])


def test_offloaded_block_without_size_has_the_size_of_the_device_blocks() -> None:
    slots = CachedRows(8)
    slots.apply(stored(1))
    slots.apply(BlockStored((1,), None, (), 0, medium="CPU"))
    apply_pending(slots)
    assert held(slots, Tier.HOST) == [(1, 0)]
    assert slots.groups.sizes.tolist() == [stored(1).block_size]
