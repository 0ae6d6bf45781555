"""The block pool: states, references, eviction order, ledger rows, and the integrity check."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvscope_engine.policy.kv_cache.block_pool import MAX_PREFIX_HITS, BlockPool
from kvscope_engine.policy.kv_groups import ONE_GROUP, find_prefix
from kvscope_engine.policy.prefixes.prefix_index import Prefix, pack_tokens, published_hash
from kvscope_telemetry.ledger import NO_OWNER, BlockState

SIZE = 4


def make_pool(num_blocks: int = 8) -> BlockPool:
    return BlockPool(num_blocks, SIZE, salt=b"test")


def write_full(pool: BlockPool, blocks: list[int], owner: int, text: int, step: int = 1) -> None:
    """Fill and seal `blocks` as the start of a text whose tokens are all `text`."""
    assert pool.index is not None
    digests: list[bytes] = []
    pool.index.extend(digests, [text] * SIZE * len(blocks))
    pool.record_write(blocks, [SIZE] * len(blocks), [owner] * len(blocks), step)
    for place, block in enumerate(blocks):
        pool.seal(block, Prefix(digests[place], place * SIZE, pack_tokens([text] * SIZE)))


def find(pool: BlockPool, text: int, num_blocks: int) -> list[int]:
    assert pool.index is not None
    digests: list[bytes] = []
    pool.index.extend(digests, [text] * SIZE * num_blocks)
    found = find_prefix(ONE_GROUP, digests, SIZE, pool.index.get)
    return found.tables[0] if found.tables else []


def row(pool: BlockPool, block: int) -> tuple[int, ...]:
    """Return state, ref_count, filled, owner, last_used_step and prefix_hits of a block."""
    ledger = pool.ledger
    names = ("state", "ref_count", "filled", "owner", "last_used_step", "prefix_hits")
    return tuple(int(getattr(ledger, name)[block]) for name in names)


@pytest.mark.parametrize("count", [1, 3])
def test_allocated_block_is_active_and_empty(count: int) -> None:
    pool = make_pool()
    blocks = pool.allocate(count, owner=5)
    assert blocks == list(range(count))
    for block in blocks:
        assert row(pool, block) == (BlockState.ACTIVE, 1, 0, 5, 0, 0)
    assert (pool.num_free, pool.num_cached, pool.num_active) == (8 - count, 0, count)
    pool.check_integrity([blocks])


def test_released_block_without_a_hash_is_free() -> None:
    pool = make_pool()
    blocks = pool.allocate(3, owner=5)
    pool.record_write(blocks, [4, 4, 2], [5, 5, 5], step=1)
    pool.release(blocks, step=9)
    for block in blocks:
        assert row(pool, block) == (BlockState.FREE, 0, 0, NO_OWNER, 9, 0)
    assert pool.num_free == 8
    pool.check_integrity([])


def test_writing_to_a_block_records_its_fill_owner_and_step() -> None:
    pool = make_pool()
    blocks = pool.allocate(2, owner=5)
    pool.record_write(blocks, [4, 1], [5, 6], step=3)
    assert row(pool, 0) == (BlockState.ACTIVE, 1, 4, 5, 3, 0)
    assert row(pool, 1) == (BlockState.ACTIVE, 1, 1, 6, 3, 0)


def test_full_hashed_block_stays_cached_and_can_be_hit() -> None:
    pool = make_pool()
    blocks = pool.allocate(2, owner=5)
    write_full(pool, blocks, owner=5, text=1)
    pool.release(blocks, step=2)
    assert row(pool, 0) == (BlockState.CACHED, 0, SIZE, 5, 2, 0)
    assert (pool.num_free, pool.num_cached, pool.num_active, pool.num_available) == (6, 2, 0, 8)
    hits = find(pool, 1, 2)
    assert hits == blocks
    assert pool.num_idle(hits) == 2
    pool.hit(hits, step=7)
    pool.hit(hits, step=8)
    assert row(pool, 0) == (BlockState.ACTIVE, 2, SIZE, 5, 8, 2)
    assert pool.num_idle(hits) == 0
    pool.check_integrity([hits, hits])


def test_published_hash_is_derived_from_the_digest() -> None:
    pool = make_pool()
    blocks = pool.allocate(1, owner=5)
    write_full(pool, blocks, owner=5, text=1)
    prefix = pool.prefix(0)
    assert prefix is not None
    assert int(pool.ledger.hash[0]) == published_hash(prefix.digest) != 0
    assert prefix.token_ids == (1, 1, 1, 1)
    assert pool.prefix(1) is None


def test_prefix_hits_saturate() -> None:
    pool = make_pool()
    blocks = pool.allocate(1, owner=5)
    write_full(pool, blocks, owner=5, text=1)
    pool.ledger.prefix_hits[0] = MAX_PREFIX_HITS - 1
    for step in range(3):
        pool.hit(blocks, step)
    assert pool.ledger.prefix_hits[0] == MAX_PREFIX_HITS


def test_free_blocks_are_used_before_the_least_recently_used_cached_tail() -> None:
    pool = make_pool()
    old, young = pool.allocate(3, owner=1), pool.allocate(2, owner=2)
    write_full(pool, old, owner=1, text=1)
    write_full(pool, young, owner=2, text=2)
    pool.release(old, step=1)
    pool.release(young, step=2)
    assert pool.allocate(3, owner=3) == [5, 6, 7]
    assert pool.evicted_blocks == 0
    assert pool.allocate(2, owner=3) == [old[2], old[1]]
    assert pool.evicted_blocks == 2
    assert find(pool, 1, 3) == [old[0]]
    assert find(pool, 2, 2) == young
    pool.check_integrity([[5, 6, 7, old[2], old[1]]])


def test_hit_makes_a_block_recently_used() -> None:
    pool = make_pool(2)
    first, second = pool.allocate(1, owner=1), pool.allocate(1, owner=2)
    write_full(pool, first, owner=1, text=1)
    write_full(pool, second, owner=2, text=2)
    pool.release(first, step=1)
    pool.release(second, step=2)
    pool.hit(first, step=3)
    pool.release(first, step=4)
    assert pool.allocate(1, owner=3) == second


def test_evicted_block_is_reset() -> None:
    pool = make_pool(1)
    blocks = pool.allocate(1, owner=1)
    write_full(pool, blocks, owner=1, text=1)
    pool.hit(blocks, step=2)
    pool.release(blocks, step=3)
    pool.release(blocks, step=3)
    assert pool.allocate(1, owner=2) == [0]
    assert row(pool, 0) == (BlockState.ACTIVE, 1, 0, 2, 3, 0)
    assert pool.ledger.hash[0] == 0
    assert find(pool, 1, 1) == []


def test_duplicate_block_is_not_cached() -> None:
    pool = make_pool()
    first, second = pool.allocate(1, owner=1), pool.allocate(1, owner=2)
    write_full(pool, first, owner=1, text=1)
    write_full(pool, second, owner=2, text=1)
    assert pool.ledger.hash[second[0]] == 0
    pool.release(second, step=1)
    assert pool.num_free == 7
    pool.check_integrity([first])


def test_shared_block_is_freed_by_its_last_holder() -> None:
    pool = make_pool()
    blocks = pool.allocate(2, owner=1)
    pool.share(blocks)
    pool.release(blocks, step=1)
    assert pool.num_active == 2
    pool.check_integrity([blocks])
    pool.release(blocks, step=2)
    assert pool.num_free == 8


def test_releasing_a_block_more_often_than_it_is_held_is_an_error() -> None:
    pool = make_pool()
    blocks = pool.allocate(1, owner=1)
    pool.release(blocks, step=1)
    with pytest.raises(AssertionError, match="released more often than held"):
        pool.release(blocks, step=1)


def test_allocating_more_than_available_is_an_error() -> None:
    pool = make_pool(2)
    with pytest.raises(AssertionError, match="1 blocks to evict, 0 cached"):
        pool.allocate(3, owner=1)


def test_reset_frees_idle_blocks_and_unhashes_active_ones() -> None:
    pool = make_pool()
    idle, active = pool.allocate(2, owner=1), pool.allocate(1, owner=2)
    write_full(pool, idle, owner=1, text=1)
    write_full(pool, active, owner=2, text=2)
    pool.release(idle, step=1)
    assert pool.reset_prefix_cache() == 2
    assert (pool.num_free, pool.num_cached, pool.num_active) == (7, 0, 1)
    assert find(pool, 1, 2) == find(pool, 2, 1) == []
    pool.check_integrity([active])
    pool.release(active, step=2)
    assert pool.num_free == 8


def test_disabled_prefix_cache_keeps_nothing() -> None:
    pool = BlockPool(2, SIZE, prefix_caching=False)
    blocks = pool.allocate(2, owner=1)
    pool.record_write(blocks, [4, 4], [1, 1], step=1)
    pool.seal(blocks[0], Prefix(b"x" * 32, 0, b"\0" * 16))
    pool.release(blocks, step=1)
    assert pool.num_free == 2
    assert pool.reset_prefix_cache() == 0
    assert pool.prefix(0) is None
    pool.check_integrity([])


def test_every_block_whose_ledger_entry_changed_is_reported_as_changed() -> None:
    pool = make_pool(64)
    rng = np.random.default_rng(5)
    copies = {name: getattr(pool.ledger, name).copy() for name in ("state", "ref_count", "filled", "hash")}
    tables: list[list[int]] = []
    for step in range(1, 200):
        tables = _random_change(pool, tables, rng, step)
        changed = set(pool.changed_rows.drain().tolist())
        assert not pool.changed_rows
        for name, before in copies.items():
            now = getattr(pool.ledger, name)
            assert set(np.flatnonzero(before != now).tolist()) <= changed
            before[:] = now
    pool.check_integrity(tables)


def _random_change(pool: BlockPool, tables: list[list[int]], rng: np.random.Generator, step: int) -> list[list[int]]:
    if tables and (pool.num_available < 6 or rng.random() < 0.4):
        pool.release(tables.pop(rng.integers(len(tables))), step)
        return tables
    text, count = int(rng.integers(5)), int(rng.integers(1, 6))
    hits = find(pool, text, count)
    if hits:
        pool.hit(hits, step)
        return [*tables, hits]
    blocks = pool.allocate(count, owner=step)
    write_full(pool, blocks, owner=step, text=text, step=step)
    return [*tables, blocks]


def test_caching_a_full_block_reports_it_as_changed() -> None:
    pool = make_pool()
    blocks = pool.allocate(2, owner=1)
    pool.record_write(blocks, [SIZE, SIZE], [1, 1], step=1)
    pool.changed_rows.drain()
    pool.seal(blocks[1], Prefix(b"x" * 32, SIZE, b"\0" * 4 * SIZE))
    assert pool.changed_rows.drain().tolist() == [blocks[1]]


def corrupt_reference(pool: BlockPool) -> None:
    pool.ledger.ref_count[0] = 2


def corrupt_state(pool: BlockPool) -> None:
    pool.ledger.state[0] = BlockState.FREE


def corrupt_owner(pool: BlockPool) -> None:
    pool.ledger.owner[0] = NO_OWNER


def corrupt_free_owner(pool: BlockPool) -> None:
    pool.ledger.owner[7] = 3


def corrupt_fill(pool: BlockPool) -> None:
    pool.ledger.filled[1] = SIZE + 1


def corrupt_hash(pool: BlockPool) -> None:
    pool.ledger.hash[0] = 77


def corrupt_unindexed(pool: BlockPool) -> None:
    pool.ledger.hash[1] = 77


def corrupt_partial(pool: BlockPool) -> None:
    pool.ledger.filled[0] = SIZE - 1


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (corrupt_reference, "block 0 has ref_count 2 and is in 1 block tables"),
        (corrupt_state, "block 0 is in neither list and its state is not ACTIVE"),
        (corrupt_owner, "block 0 is not free and has no owner"),
        (corrupt_free_owner, "block 7 is free and has an owner"),
        (corrupt_fill, "block 1 is filled beyond its slots"),
        (corrupt_hash, "block 0 shows the hash of another"),
        (corrupt_unindexed, "block 1 is hashed and not in the prefix index"),
        (corrupt_partial, "block 0 is hashed and not full"),
    ],
)
def test_integrity_check_names_the_error_and_the_block(corrupt: Callable[[BlockPool], None], message: str) -> None:
    pool = make_pool()
    blocks = pool.allocate(2, owner=1)
    write_full(pool, blocks[:1], owner=1, text=1)
    pool.check_integrity([blocks])
    corrupt(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity([blocks])


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[0], [0, 1]], "block 0 has ref_count 1 and is in 2 block tables"),
        ([[0]], "block 1 has ref_count 1 and is in 0 block tables"),
        ([[0, 1, 1]], "block 1 is in a block table more than once"),
        ([[0, 1, 99]], "block 99 in a block table does not exist"),
    ],
)
def test_integrity_check_compares_references_with_block_tables(tables: list[list[int]], message: str) -> None:
    pool = make_pool()
    pool.allocate(2, owner=1)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(tables)


def published_order(pool: BlockPool) -> list[int]:
    """Return the blocks in eviction order according to the ledger."""
    order = pool.ledger.eviction_order
    return sorted(np.flatnonzero(order).tolist(), key=lambda block: int(order[block]))


def test_ledger_has_the_eviction_order() -> None:
    pool = make_pool()
    first, second = pool.allocate(3, owner=1), pool.allocate(3, owner=2)
    write_full(pool, first, 1, text=7)
    write_full(pool, second, 2, text=8)
    assert not pool.ledger.eviction_order.any()
    pool.release(first, 2)
    pool.release(second, 3)
    assert published_order(pool) == first[::-1] + second[::-1]
    hits = find(pool, 7, 2)
    pool.hit(hits, 4)  # used again: evicted after all others
    assert published_order(pool) == [first[2], *second[::-1]]
    pool.release(hits, 5)
    expected = [first[2], *second[::-1], first[1], first[0]]
    assert published_order(pool) == expected
    pool.changed_rows.drain()
    pool.allocate(pool.num_free, owner=3)
    assert [pool.allocate(1, owner=3)[0] for _ in expected] == expected
    assert not pool.ledger.eviction_order.any()


def test_pinned_blocks_are_not_in_the_eviction_order() -> None:
    pool = make_pool()
    blocks = pool.allocate(4, owner=1)
    write_full(pool, blocks, 1, text=7)
    pool.pin(blocks[:1])  # while it is in use
    pool.release(blocks, 2)
    pool.changed_rows.drain()
    pool.pin([blocks[2]])
    assert pool.changed_rows.drain().tolist() == [blocks[2]]
    assert published_order(pool) == [blocks[3], blocks[1]]
    pool.unpin(blocks)
    assert pool.changed_rows.drain().tolist() == [blocks[0], blocks[2]]
    assert published_order(pool) == [blocks[3], blocks[1], blocks[0], blocks[2]]
    pool.evict([blocks[1]])
    assert published_order(pool) == [blocks[3], blocks[0], blocks[2]]
    pool.pin([blocks[0]])
    pool.check_integrity([])
    pool.reset_prefix_cache()
    assert not pool.ledger.eviction_order.any()


def test_eviction_order_is_renumbered_when_its_numbers_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscope_engine.policy.kv_cache.eviction_order.MAX_EVICTION_ORDER", 7)
    pool = make_pool()
    expected: list[int] = []
    for text in range(1, 5):
        blocks = pool.allocate(2, owner=text)
        write_full(pool, blocks, text, text)
        pool.changed_rows.drain()
        pool.release(blocks, text)
        changed = pool.changed_rows.drain().tolist()
        expected += blocks[::-1]
        assert published_order(pool) == expected
        assert changed == (sorted(expected) if text == 4 else sorted(blocks))
        pool.check_integrity([])
    hits = find(pool, 1, 2)
    pool.hit(hits, 9)
    pool.release(hits, 9)
    assert published_order(pool) == expected[2:] + expected[:2]
