"""Reserving policies in the scheduler: reservations over time, growing beyond a run, and their visible state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.request_state import RequestState

Make = Callable[..., Any]  # fixture of tests/engine/conftest.py


@pytest.fixture
def reserve(drive: Make) -> Make:
    """Function that makes a `Drive` with blocks of 4, without a prefix cache, and with the given policy."""

    def make(allocator: str, **sizes: Any) -> Any:
        given = {"prefix_caching": False, "max_model_len": 64, "knows_lengths": allocator == "oracle"} | sizes
        return drive(allocator=allocator, **given)

    return make


def held(one: Any, number: int) -> list[int]:
    """Return the blocks that the ledger assigns to the request."""
    ledger = one.pool.ledger
    return ((ledger.owner == number) & (ledger.state == BlockState.ACTIVE)).nonzero()[0].tolist()


def test_contiguous_reserves_the_maximum_from_the_start(reserve: Make) -> None:
    one = reserve("contiguous", num_blocks=40)
    first, second = one.submit([1] * 5, 10), one.submit([2] * 9, 3)
    one.step()
    assert (first.block_table, second.block_table) == ([0, 1], [16, 17, 18])
    assert (held(one, 1), held(one, 2)) == (list(range(16)), list(range(16, 32)))
    ledger = one.pool.ledger
    assert ledger.filled[:16].tolist() == [4, 1] + [0] * 14
    assert (ledger.ref_count[:32] == 1).all()
    assert (first.num_reserved_tokens, second.num_reserved_tokens) == (64, 64)
    assert one.pool.num_free == 8
    causes = [event.cause for event in one.scheduler.changes.drain_events() if event.kind == "admitted"]
    assert ["a run of 16 blocks reserved for it, " in cause for cause in causes] == [True] * 2


def test_contiguous_allocator_admits_a_request_only_if_a_free_run_is_long_enough(reserve: Make) -> None:
    """40 blocks are two runs of 16; the remaining 8 are useless, and there is no watermark."""
    one = reserve("contiguous", num_blocks=40)
    requests = [one.submit([n], 2) for n in range(3)]
    one.step()
    assert [request.state for request in requests] == [RequestState.RUNNING] * 2 + [RequestState.WAITING]
    one.run()
    assert one.scheduler.totals.preemptions == 0
    assert one.pool.longest_run == 32


def test_oracle_allocator_reserves_the_exact_final_length(reserve: Make) -> None:
    """14 tokens are 4 blocks; 17 are 5, in a run of 8."""
    one = reserve("oracle", num_blocks=16)
    one.submit([1] * 4, 10)
    one.submit([2] * 7, 10)
    one.step()
    assert [len(held(one, 1)), len(held(one, 2))] == [4, 8]
    assert [request.num_reserved_tokens for request in one.scheduler.requests.values()] == [14, 17]


def test_oracle_refuses_a_request_without_expected_tokens(reserve: Make) -> None:
    one = reserve("oracle", num_blocks=16, knows_lengths=False)
    with pytest.raises(BadInput, match="expected_tokens=None"):
        one.submit([1] * 4, 10)
    (event,) = one.scheduler.changes.drain_events()
    assert event.kind == "refused"
    with pytest.raises(BadInput, match="expected_tokens=None"):
        one.scheduler.check_fits(one.request([1] * 4, 10))


@pytest.mark.parametrize("allocator", ["buddy", "oracle"])
def test_request_that_needs_a_longer_run_than_the_pool_can_have_is_refused(reserve: Make, allocator: str) -> None:
    one = reserve(allocator, num_blocks=12)
    with pytest.raises(BadInput, match=r"make 33 tokens: at most 32 .* longest run of 8 blocks .* pool of 12"):
        one.submit([1] * 13, 20)
    one.submit([1] * 12, 20)
    one.run()


def test_buddy_reserves_the_rounded_known_output(reserve: Make) -> None:
    """A prompt of 3 and an output of 25: 3 + 32 tokens in 9 blocks, in a run of 16."""
    one = reserve("buddy", num_blocks=32, knows_lengths=True)
    request = one.submit([1] * 3, 25)
    one.step()
    assert (request.num_reserved_tokens, len(held(one, 1))) == (35, 16)
    one.run()


def test_buddy_grows_in_place_while_its_buddy_is_free(reserve: Make) -> None:
    one = reserve("buddy", num_blocks=8)
    request = one.submit([1] * 3, 25)
    seen, copies = set(), []
    while not request.is_finished:
        plan, _ = one.step()
        copies += plan.copies
        seen.add(tuple(held(one, 1)))
    assert seen == {(), (0,), (0, 1), (0, 1, 2, 3), tuple(range(8))}
    assert copies == []


def test_request_in_a_buddy_run_moves_to_a_larger_run_if_the_adjacent_half_is_taken(
    reserve: Make, expected_completion: Make
) -> None:
    """Request 1 has block 0 and request 2 block 1: request 1 moves, and its old block is freed after the step."""
    one = reserve("buddy", num_blocks=8)
    first, second = one.submit([1] * 3, 6), one.submit([2] * 3, 1 + 8)
    one.step()
    assert (first.block_table, second.block_table) == ([0], [1])
    one.step()
    plan = one.scheduler.schedule(3, 0)
    assert plan.copies == ((0, 2), (1, 4))
    assert (first.block_table, second.block_table) == ([2, 3], [4, 5])
    assert held(one, 1) == [0, 2, 3], "the source of a copy is held until the step was run"
    assert one.pool.ledger.filled[[0, 2, 1, 4]].tolist() == [0, 4, 0, 4]
    one.scheduler.check_integrity()
    one._run(plan)
    one.scheduler.commit(plan, 3, 0)
    assert (held(one, 1), held(one, 2)) == ([2, 3], [4, 5])
    for item in plan.scheduled:
        item.request.output_token_ids.append(expected_completion(item.request.tokens(0, 5), 1)[0])
    one.run()
    assert first.output_token_ids == expected_completion([1] * 3, 6)
    assert second.output_token_ids == expected_completion([2] * 3, 9)
    assert one.scheduler.totals.preemptions == 0


def test_request_in_a_buddy_run_moves_down_if_only_the_lower_half_is_free(
    reserve: Make, expected_completion: Make
) -> None:
    """When the older request ends, the other one in the upper half of a full pool copies itself down."""
    one = reserve("buddy", num_blocks=4)
    first, second = one.submit([1] * 5, 2), one.submit([2] * 5, 10)
    while second.num_computed_tokens < 8:
        one.step()
    assert first.is_finished
    assert second.block_table == [2, 3]
    plan, _ = one.step()
    assert plan.copies == ((2, 0), (3, 1))
    assert second.block_table == [0, 1, 2]
    assert held(one, 2) == [0, 1, 2, 3]
    assert one.pool.ledger.filled.tolist() == [4, 4, 1, 0]
    one.run()
    assert second.output_token_ids == expected_completion([2] * 5, 10)


def test_buddy_preempts_and_reports_it_if_no_run_is_free(reserve: Make, expected_completion: Make) -> None:
    one = reserve("buddy", num_blocks=4)
    first, second = one.submit([1] * 5, 8), one.submit([2] * 5, 8)
    one.run()
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    (event,) = [event for event in one.scheduler.changes.drain_events() if event.kind == "preempted"]
    assert event.cause.startswith(
        "request #1 needed 1 block and none was available; request #2 was chosen, being the newest"
    )
    for request in (first, second):
        assert request.output_token_ids == expected_completion(request.prompt_token_ids, 8)


@pytest.mark.parametrize("allocator", ["contiguous", "buddy", "oracle"])
def test_forked_request_under_reserving_allocators_waits_and_shares_no_blocks(
    reserve: Make, expected_completion: Make, allocator: str
) -> None:
    one = reserve(allocator, num_blocks=64)
    parent = one.submit([1] * 6, 10)
    one.step()
    one.step()
    child = one.fork(parent)
    assert (child.state, child.block_table) == (RequestState.WAITING, [])
    one.step()
    assert child.state is RequestState.RUNNING
    assert not set(held(one, 1)) & set(held(one, 2))
    one.run()
    assert parent.output_token_ids == child.output_token_ids == expected_completion([1] * 6, 10)


@pytest.mark.parametrize("allocator", ["contiguous", "buddy", "oracle"])
def test_abort_frees_the_whole_run_and_counts_it(reserve: Make, allocator: str) -> None:
    one = reserve(allocator, num_blocks=64)
    request = one.submit([1] * 6, 10)
    one.step()
    num_held = len(held(one, 1))
    assert num_held >= 2
    one.scheduler.abort(request, 0)
    assert request.num_reserved_tokens == 0
    assert one.pool.num_free == one.pool.longest_run == 64
    assert one.scheduler.changes.drain_events()[-1].num_blocks == num_held
    one.scheduler.check_integrity()


def test_abort_between_schedule_and_commit_frees_both_runs(reserve: Make) -> None:
    one = reserve("buddy", num_blocks=8)
    first, second = one.submit([1] * 3, 6), one.submit([2] * 3, 9)
    one.step()
    one.step()
    plan = one.scheduler.schedule(3, 0)
    assert held(one, 1) == [0, 2, 3]
    one.scheduler.abort(first, 0)
    assert held(one, 1) == []
    one.scheduler.check_integrity()
    assert one.scheduler.changes.drain_events()[-1].num_blocks == 3
    one.scheduler.commit(plan, 3, 0)
    one.scheduler.abort(second, 0)
    assert one.pool.longest_run == 8


def test_integrity_check_detects_wrong_reference_counts_and_blocks_outside_a_reservation(reserve: Make) -> None:
    one = reserve("oracle", num_blocks=16)
    request = one.submit([1] * 4, 10)
    one.step()
    one.pool.ledger.ref_count[3] = 2
    with pytest.raises(AssertionError, match="block 3 has ref_count 2 and is in 1 block tables"):
        one.scheduler.check_integrity()
    one.pool.ledger.ref_count[3] = 1
    request.block_table[0] = 2
    with pytest.raises(AssertionError, match="request 1 has blocks outside its run"):
        one.scheduler.check_integrity()
