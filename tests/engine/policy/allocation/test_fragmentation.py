"""What KV slots are used for, compared with hand-computed numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvscope_engine.policy.allocation.fragmentation import KVUse, kv_use
from kvscope_engine.policy.kv_cache.block_pool import BlockPool

Make = Callable[..., Any]  # fixture of tests/engine/conftest.py


def use_of(one: Any) -> KVUse:
    return kv_use(one.pool, one.scheduler.requests.values())


def test_empty_pool_is_free_and_unfragmented() -> None:
    use = kv_use(BlockPool(8, 4), [])
    assert use == KVUse(32, 0, 0, 0, 0, 0, num_external=32, largest_free_run=32)
    assert use.external_fragmentation == 0.0


def test_full_pool_has_no_external_fragmentation() -> None:
    pool = BlockPool(2, 4)
    pool.allocate(2, 1)
    use = kv_use(pool, [])
    assert (use.num_external, use.largest_free_run, use.external_fragmentation) == (0, 0, 0.0)


def test_scattered_free_blocks_are_external_fragmentation() -> None:
    """Of 8 blocks, 0-2, 4, 6 and 7 are free: the longest run has 3 of 6."""
    pool = BlockPool(8, 4, prefix_caching=False)
    pool.allocate(8, 1)
    pool.release([0, 1, 2, 4, 6, 7], 1)
    use = kv_use(pool, [])
    assert (use.num_external, use.largest_free_run) == (24, 12)
    assert use.external_fragmentation == pytest.approx(0.5)


def test_paged_wastes_the_rest_of_the_last_block(drive: Make) -> None:
    """5 tokens in 2 blocks of 4, and 8 tokens in 2."""
    one = drive(num_blocks=10, block_size=4, prefix_caching=False, knows_lengths=True)
    one.submit([1] * 5, 9)
    one.submit([2] * 8, 9)
    one.step()
    assert use_of(one) == KVUse(40, 13, 0, 3, 0, 0, num_external=24, largest_free_run=24)


def test_paged_counts_shared_and_cached_tokens_once(drive: Make) -> None:
    """10 tokens in 3 blocks, 2 of them full: shared with the fork, then cached."""
    one = drive(num_blocks=10, block_size=4)
    parent = one.submit([1] * 10, 9)
    one.step()
    child = one.fork(parent)
    assert use_of(one) == KVUse(40, 10, 0, 2, 0, 0, num_external=28, largest_free_run=28)
    one.scheduler.abort(parent, 0)
    one.scheduler.abort(child, 0)
    assert use_of(one) == KVUse(40, 0, 0, 0, 0, 8, num_external=32, largest_free_run=32)


def test_contiguous_allocator_with_known_lengths_counts_unused_slots_as_wasted(drive: Make) -> None:
    """64 slots for 5 + 10 tokens, 5 of them present: 10 will be used, 49 never. 16 + 8 of 40 blocks are free."""
    one = drive(num_blocks=40, block_size=4, max_model_len=64, **reserving("contiguous"))
    one.submit([1] * 5, 10)
    one.step()
    use = use_of(one)
    assert use == KVUse(160, 5, 10, 49, 0, 0, num_external=96, largest_free_run=96)
    assert use.num_external_and_others == 96


def test_contiguous_with_unknown_lengths_counts_everything_as_reserved(drive: Make) -> None:
    one = drive(num_blocks=40, block_size=4, max_model_len=64, **reserving("contiguous", knows_lengths=False))
    one.submit([1] * 5, 10)
    one.step()
    assert use_of(one) == KVUse(160, 5, 59, 0, 0, 0, num_external=96, largest_free_run=96)


def test_contiguous_run_for_a_length_that_is_no_power_of_two_is_rounded_up(drive: Make) -> None:
    """50 slots are 13 blocks in a run of 16, so that 14 slots belong to no request."""
    one = drive(num_blocks=40, block_size=4, max_model_len=50, **reserving("contiguous"))
    one.submit([1] * 5, 10)
    one.step()
    use = use_of(one)
    assert use == KVUse(160, 5, 10, 35, 14, 0, num_external=96, largest_free_run=96)
    assert use.num_external_and_others == 110


def test_buddy_reserves_32_tokens_for_25(drive: Make) -> None:
    """3 + 25 tokens: 3 present, 25 to come, 7 never used, and a run of 16 blocks for 35 slots."""
    one = drive(num_blocks=32, block_size=4, **reserving("buddy"))
    one.submit([1] * 3, 25)
    one.step()
    assert use_of(one) == KVUse(128, 3, 25, 7, 64 - 35, 0, num_external=64, largest_free_run=64)
    one.step()
    assert use_of(one) == KVUse(128, 4, 24, 7, 64 - 35, 0, num_external=64, largest_free_run=64)


def test_oracle_wastes_only_what_the_allocator_rounds_up(drive: Make) -> None:
    """17 tokens in a run of 8 blocks and 14 in one of 4; 4 of 16 blocks are free."""
    one = drive(num_blocks=16, block_size=4, **reserving("oracle"))
    one.submit([1] * 7, 10)
    one.submit([2] * 4, 10)
    one.step()
    use = use_of(one)
    assert use == KVUse(64, 11, 20, 0, 15 + 2, 0, num_external=16, largest_free_run=16)


def test_tokens_beyond_a_buddy_reservation_use_the_rest_of_the_run(drive: Make) -> None:
    """Buddy reserves 3 + 1 tokens, and at the fifth token 3 + 2 in two blocks; tokens 6 and 7 need no more blocks."""
    one = drive(num_blocks=8, block_size=4, **reserving("buddy", knows_lengths=False))
    request = one.submit([1] * 3, 12)
    while request.num_computed_tokens < 7:
        one.step()
    assert request.num_reserved_tokens == 5
    assert use_of(one) == KVUse(32, 7, 0, 0, 1, 0, num_external=24, largest_free_run=24)


def test_request_beyond_its_expected_length_uses_the_surplus(drive: Make) -> None:
    one = drive(num_blocks=16, block_size=4, max_model_len=64, **reserving("contiguous"))
    request = one.submit([1] * 5, 10)
    request.expected_tokens = 6
    one.step()
    assert use_of(one) == KVUse(64, 5, 1, 58, 0, 0, num_external=0, largest_free_run=0)
    while request.num_computed_tokens < 8:
        one.step()
    assert use_of(one) == KVUse(64, 8, 0, 56, 0, 0, num_external=0, largest_free_run=0)


def reserving(allocator: str, *, knows_lengths: bool = True) -> dict[str, Any]:
    return {"allocator": allocator, "prefix_caching": False, "knows_lengths": knows_lengths}


def test_virtual_wastes_the_rest_of_the_last_page(drive: Make) -> None:
    """Ten pages of 4 blocks of 4 tokens: 17 tokens in two pages, 3 in one. Unmapped addresses are no slots."""
    one = drive(num_blocks=40, max_model_len=64, block_bytes=(8, 8), **reserving("virtual"))
    one.submit([1] * 17, 9)
    short = one.submit([2] * 3, 9)
    assert use_of(one) == KVUse(160, 0, 0, 0, 0, 0, num_external=160, largest_free_run=160)
    one.step()
    assert one.pool.num_blocks == 128
    use = use_of(one)
    assert use == KVUse(160, 20, 0, 15 + 13, 0, 0, num_external=112, largest_free_run=112)
    assert use.external_fragmentation == 0.0
    one.scheduler.abort(short, 0)
    assert use_of(one) == KVUse(160, 17, 0, 15, 0, 0, num_external=128, largest_free_run=128)


def test_virtual_counts_fractions_of_blocks_across_pages(drive: Make) -> None:
    """32 bytes hold one and a third blocks: 7 pages have 37 slots, and the 2 pages of 5 tokens in two blocks
    have 10.
    """
    one = drive(num_blocks=10, block_bytes=(24,), **reserving("virtual"))
    one.submit([1] * 5, 9)
    one.step()
    assert use_of(one) == KVUse(37, 5, 0, 5, 0, 0, num_external=27, largest_free_run=27)
