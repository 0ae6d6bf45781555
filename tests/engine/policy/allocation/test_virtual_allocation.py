"""The policy `virtual` in the scheduler: where blocks lie, when pages are mapped and unmapped, who is preempted.

A page holds 4 blocks of 4 tokens; a slot, for 64 tokens, has 16 blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.request_state import RequestState

Make = Callable[..., Any]  # fixture of tests/engine/conftest.py


@pytest.fixture
def virtual(drive: Make) -> Make:
    """Function that makes a `Drive` with the given number of pages in each of two layers."""

    def make(num_pages: int, **sizes: Any) -> Any:
        given = {"prefix_caching": False, "max_model_len": 64, "block_bytes": (8, 8), "page_bytes": 32}
        return drive(allocator="virtual", num_blocks=4 * num_pages, **(given | sizes))

    return make


def rows(one: Any, state: BlockState) -> list[int]:
    return (one.pool.ledger.state == state).nonzero()[0].tolist()


def test_all_blocks_of_the_virtual_allocator_are_unmapped_at_first(virtual: Make) -> None:
    one = virtual(5, max_num_seqs=3)
    assert one.pool.num_blocks == 48
    assert rows(one, BlockState.UNMAPPED) == one.pool.changed_rows.drain().tolist() == list(range(48))
    assert (one.pool.num_free, one.pool.num_active, one.pool.num_unmapped) == (0, 0, 48)


def test_request_is_contiguous_and_pages_are_mapped_as_it_grows(virtual: Make) -> None:
    one = virtual(5)
    request = one.submit([1] * 15, 20)
    one.step()
    assert request.block_table == [0, 1, 2, 3]
    assert rows(one, BlockState.ACTIVE) == [0, 1, 2, 3]
    one.step()
    one.step()
    assert request.block_table == [0, 1, 2, 3, 4]
    assert rows(one, BlockState.ACTIVE) == [0, 1, 2, 3, 4]
    assert rows(one, BlockState.FREE) == [5, 6, 7]
    assert sorted(one.pages.pages) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert request.num_reserved_tokens == 0


def test_pages_outlive_their_request_and_are_reused_by_fitting_ones(virtual: Make) -> None:
    """Slots have 2, 1 and 3 pages: a request that needs one gets the second, one that needs three the third."""
    one = virtual(8, max_num_batched_tokens=200)
    for length in (30, 10, 40):
        one.submit([length] * length, 1)
    one.step()
    assert not one.scheduler.requests
    assert (len(rows(one, BlockState.FREE)), len(one.pages.pages)) == (24, 12)
    short, long = one.submit([1] * 9, 2), one.submit([2] * 41, 2)
    one.step()
    assert (short.block_table[0], long.block_table[0]) == (16, 32)
    assert len(one.pages.pages) == 12, "nothing had to be mapped"
    assert one.pages.num_unmapped == 0


def test_pages_are_unmapped_only_if_none_is_free_and_from_the_last_slot(virtual: Make) -> None:
    one = virtual(4, max_num_batched_tokens=200, max_num_seqs=4)
    for length in (16, 10):
        one.submit([length] * length, 1)
    one.step()
    request = one.submit([1] * 32, 20)
    one.step()
    assert (request.block_table[0], one.pages.num_unmapped) == (0, 0)
    while request.num_computed_tokens < 33:
        one.step()
    assert one.pages.num_unmapped == 0, "the fourth page was free"
    while request.num_computed_tokens < 49:
        one.step()
    assert one.pages.num_unmapped == 2, "the page of slot 1, in both layers"
    assert rows(one, BlockState.UNMAPPED) == list(range(16, 64))
    one.run()


def test_available_blocks_count_unmapped_pages(virtual: Make) -> None:
    """Of 5 pages, the first request needs 2 for 5 blocks and the second 1 for one; with the 2 others, each could get 8
    more blocks.
    """
    one = virtual(5)
    first, second = one.submit([1] * 17, 9), one.submit([2] * 3, 9)
    one.step()
    tables = one.scheduler.tables
    assert tables.num_available(first) == 3 + 8
    assert tables.num_available(second) == 3 + 8
    third = one.request([3], 1)
    assert tables.num_available(third) == 4, "a newcomer leaves one page to those who run"
    one.scheduler.abort(first, 0)
    assert tables.num_available(third) == 12
    assert tables.num_available(second) == 15, "a slot has 16 blocks"
    one.scheduler.abort(second, 0)
    assert tables.num_available(third) == 16


def test_new_request_waits_for_a_slot(virtual: Make) -> None:
    one = virtual(2)
    first = one.submit([1] * 3, 5)
    second, third = one.submit([2] * 3, 5), one.submit([3] * 3, 5)
    one.step()
    assert one.pool.num_blocks == 32, "two pages, two slots"
    assert first.state is RequestState.RUNNING
    assert {second.state, third.state} == {RequestState.WAITING}
    one.run()
    assert one.scheduler.totals.preemptions == 0


def test_newest_request_is_preempted_for_pages_and_recomputed(virtual: Make, expected_completion: Make) -> None:
    """Of 4 pages each request has one; the second takes the last at its 17th token, and the first finds none."""
    one = virtual(4, max_num_batched_tokens=100)
    requests = [one.submit([1] * 10, 12), one.submit([2] * 15, 8), one.submit([3] * 3, 12)]
    one.run()
    assert [request.num_preemptions for request in requests] == [0, 0, 1]
    (event,) = [event for event in one.scheduler.changes.drain_events() if event.kind == "preempted"]
    assert event.cause.startswith(
        "request #1 needed 1 block and none was available; request #3 was chosen, being the newest"
    )
    assert one.pages.num_unmapped > 0
    for request in requests:
        assert request.output_token_ids == expected_completion(request.prompt_token_ids, request.max_tokens)


def test_single_request_may_use_all_memory(virtual: Make) -> None:
    one = virtual(3)
    assert one.scheduler.max_request_tokens == 48
    with pytest.raises(BadInput, match=r"make 49 tokens: at most 48 are accepted, .* pages for 12 blocks of 4"):
        one.submit([1] * 40, 9)
    one.submit([1] * 40, 8)
    one.run()
    assert virtual(9).scheduler.max_request_tokens == 64, "the limit is the size of a slot"


def test_nothing_is_unmapped_between_schedule_and_commit(virtual: Make) -> None:
    """An abort in between keeps the pages that the step may still write to."""
    one = virtual(2)
    request = one.submit([1] * 30, 2)
    plan = one.scheduler.schedule(1, 0)
    pages = set(one.pages.pages)
    one.scheduler.abort(request, 0)
    assert one.pages.pages == pages
    one.scheduler.check_integrity()
    one.scheduler.commit(plan, 1, 0)
    one.scheduler.check_integrity()
    assert rows(one, BlockState.ACTIVE) == []


def test_forked_request_under_the_virtual_allocator_waits_and_gives_the_same_tokens(
    virtual: Make, expected_completion: Make
) -> None:
    one = virtual(8)
    parent = one.submit([1] * 6, 10)
    one.step()
    child = one.fork(parent)
    assert child.state is RequestState.WAITING
    one.run()
    assert parent.output_token_ids == child.output_token_ids == expected_completion([1] * 6, 10)


def test_integrity_check_detects_blocks_whose_memory_mapping_is_inconsistent(virtual: Make) -> None:
    one = virtual(4)
    request = one.submit([1] * 9, 10)
    one.step()
    ledger = one.pool.ledger
    ledger.state[3] = BlockState.UNMAPPED
    with pytest.raises(AssertionError, match="block 3 has memory and no page, or a page and no memory"):
        one.scheduler.check_integrity()
    ledger.state[3] = BlockState.FREE
    one.scheduler.check_integrity()
    one.pool._free.allocate(one.pool._free.ids)
    with pytest.raises(AssertionError, match="block 3 is in neither list and its state is not ACTIVE"):
        one.scheduler.check_integrity()
    one.pool._free.append_n((ledger.state == BlockState.FREE).nonzero()[0])
    ledger.filled[40] = 1
    with pytest.raises(AssertionError, match="block 40 is free and filled"):
        one.scheduler.check_integrity()
    ledger.filled[40] = 0
    request.block_table[1:] = [2, 1]
    with pytest.raises(AssertionError, match="request 1 has blocks out of its slot"):
        one.scheduler.check_integrity()
    request.block_table[1:] = [1]
    with pytest.raises(AssertionError, match="block 2 has ref_count 1 and is in 0 block tables"):
        one.scheduler.check_integrity()
