"""The scheduler's rules one by one: chunks, order, admission, preemption, ends, forks, the prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.request_state import RequestState, WaitsFor
from kvscope_telemetry.messages.telemetry import Event

Make = Callable[..., Any]  # fixture of tests/engine/conftest.py


def tokens_by_request(plan: Any) -> dict[int, int]:
    """Return request number -> tokens of a plan."""
    return {item.request.number: item.num_tokens for item in plan.scheduled}


def events(drive: Any, kind: str) -> list[Event]:
    return [event for event in drive.scheduler.changes.drain_events() if event.kind == kind]


def test_request_runs_to_its_end(drive: Make, expected_completion: Make) -> None:
    one = drive()
    request = one.submit([3, 1, 4, 1, 5], 9)
    assert one.run() == 9
    assert request.output_token_ids == expected_completion([3, 1, 4, 1, 5], 9)
    assert request.state is RequestState.FINISHED
    assert request.finish_reason == "length"
    assert request.block_table == []
    assert not one.scheduler.requests
    assert one.pool.num_active == 0


def test_block_tables_grow_as_tokens_come(drive: Make) -> None:
    one = drive(block_size=4)
    request = one.submit([1, 2, 3], 8)
    lengths = []
    while not request.is_finished:
        plan = one.scheduler.schedule(one.step_count, one.now_ns)
        lengths.append(len(request.block_table))
        one.scheduler.commit(plan, one.step_count, 0)
        request.output_token_ids.append(1)
        if len(request.output_token_ids) == 8:
            one.scheduler.finish(request, "length", one.now_ns)
    assert lengths == [1, 1, 2, 2, 2, 2, 3, 3]


def test_token_cap_limits_steps_until_it_is_removed(drive: Make) -> None:
    one = drive(max_num_batched_tokens=10)
    request = one.submit(range(35), 1)
    assert tokens_by_request(one.step()[0]) == {1: 10}
    one.scheduler.limits.cap_tokens(4)
    assert tokens_by_request(one.step()[0]) == {1: 4}
    one.scheduler.limits.set(8, 6)
    assert tokens_by_request(one.step()[0]) == {1: 4}
    one.scheduler.limits.set(8, 3)
    assert tokens_by_request(one.step()[0]) == {1: 3}, "a lower limit of the user must win"
    one.scheduler.limits.set(8, 10)
    one.scheduler.limits.cap_tokens(None)
    assert tokens_by_request(one.step()[0]) == {1: 10}
    assert one.run() == 1
    assert request.is_finished


def test_long_prompt_runs_in_chunks(drive: Make) -> None:
    one = drive(max_num_batched_tokens=10)
    request = one.submit(range(25), 1)
    plans = [one.step()[0] for _ in range(3)]
    assert [tokens_by_request(plan) for plan in plans] == [{1: 10}, {1: 10}, {1: 5}]
    assert [plan.scheduled[0].samples for plan in plans] == [False, False, True]
    assert request.is_finished


def test_decodes_come_before_prefill_chunks(drive: Make) -> None:
    one = drive(max_num_batched_tokens=10)
    one.submit([1, 2], 20)
    one.step()
    one.submit(range(20, 50), 2)
    plan, _ = one.step()
    assert tokens_by_request(plan) == {1: 1, 2: 9}
    assert plan.num_single_token == 1
    assert plan.scheduled[0].request.number == 1


def test_requests_that_arrive_together_run_together(drive: Make) -> None:
    one = drive(max_num_batched_tokens=32)
    for start in (0, 10, 20):
        one.submit(range(start, start + 8), 3)
    assert tokens_by_request(one.step()[0]) == {1: 8, 2: 8, 3: 8}
    assert tokens_by_request(one.step()[0]) == {1: 1, 2: 1, 3: 1}


def test_max_num_seqs_limits_the_running_requests(drive: Make) -> None:
    one = drive(max_num_seqs=2)
    for start in range(0, 50, 10):
        one.submit(range(start, start + 3), 4)
    one.step()
    assert (one.scheduler.num_running, one.scheduler.num_waiting) == (2, 3)
    one.run()


def test_next_waiting_request_knows_what_it_waits_for(drive: Make) -> None:
    one = drive(num_blocks=6, block_size=4, max_num_seqs=3, max_num_batched_tokens=8, prefix_caching=False)
    late = [one.submit([number] * 8, 3) for number in range(4)]
    assert {request.waits_for for request in late} == {WaitsFor.UNKNOWN}, "no step was planned since they came"
    one.step()
    assert [request.waits_for for request in late[1:3]] == [WaitsFor.BUDGET, WaitsFor.UNKNOWN]
    one.step()
    one.step()
    assert late[2].waits_for is WaitsFor.BLOCKS
    assert late[1].waits_for is WaitsFor.UNKNOWN, "a running request waits for nothing"
    one.run()
    narrow = drive(max_num_seqs=1)
    narrow.submit([1], 2)
    second = narrow.submit([2], 1)
    narrow.step()
    assert second.waits_for is WaitsFor.SEQUENCE_LIMIT


def test_request_may_wait_for_its_grammar_or_for_the_prompt_of_its_parent(drive: Make) -> None:
    one = drive(max_num_batched_tokens=8)
    _, child = one.siblings(range(12), 3, 1)
    one.step()
    assert child.waits_for is WaitsFor.PROMPT
    one.step()
    assert (child.state, child.waits_for) == (RequestState.RUNNING, WaitsFor.UNKNOWN)
    formed = one.submit([7], 1)
    form = formed.matcher = SimpleNamespace(is_ready=False)
    one.step()
    assert formed.waits_for is WaitsFor.GRAMMAR
    form.is_ready = True
    one.run()


def test_requests_are_served_in_arrival_order(drive: Make) -> None:
    one = drive(max_num_seqs=1)
    requests = [one.submit([start, start], 3) for start in range(5)]
    ends = []
    while one.scheduler.requests:
        one.step()
        ends += [r.number for r in requests if r.is_finished and r.number not in ends]
    assert ends == [1, 2, 3, 4, 5]


def test_higher_priority_is_admitted_first_but_does_not_preempt(drive: Make) -> None:
    one = drive(max_num_seqs=1)
    running = one.submit([1, 1], 5)
    one.step()
    low, high = one.submit([2, 2], 2), one.submit([3, 3], 2, priority=5)
    one.step()
    assert running.state is RequestState.RUNNING
    while not running.is_finished:
        one.step()
    one.step()
    assert (low.state, high.state) == (RequestState.WAITING, RequestState.RUNNING)
    one.run()


def test_first_waiting_request_is_not_overtaken(drive: Make) -> None:
    one = drive(num_blocks=10, max_num_batched_tokens=64, prefix_caching=False)
    one.submit(range(20), 8)
    one.step()
    big, small = one.submit(range(100, 130), 1), one.submit([1], 1)
    one.step()
    assert (big.state, small.state) == (RequestState.WAITING, RequestState.WAITING)
    one.run()
    assert big.admitted_ns is not None
    assert small.admitted_ns is not None
    assert big.admitted_ns <= small.admitted_ns


@pytest.mark.parametrize(("length", "state"), [(8, RequestState.RUNNING), (9, RequestState.WAITING)])
def test_admission_keeps_a_watermark(drive: Make, length: int, state: RequestState) -> None:
    one = drive(num_blocks=5, block_size=4, prefix_caching=False)
    one.submit([1] * 5, 4)  # takes 2 blocks; of the 3 others, 1 is the watermark
    one.step()
    second = one.submit([2] * length, 1)
    one.scheduler.schedule(2, one.now_ns)
    assert second.state is state


def test_watermark_does_not_prevent_a_request_from_running_alone(drive: Make) -> None:
    one = drive(num_blocks=5, block_size=4)
    one.submit([1] * 19, 1)
    assert one.run() == 1


def test_cached_blocks_of_a_hit_are_not_evicted_for_the_same_prompt(drive: Make) -> None:
    """They cannot both be reused and be evicted for the rest of the prompt."""
    one = drive(num_blocks=8, block_size=4)
    one.submit(range(12), 1)
    one.run()
    assert one.pool.num_cached == 3
    one.submit([40] * 11, 9)
    one.step()
    again = one.submit([*range(12), *range(8)], 1)  # 3 blocks cached, 2 more needed, 2 free, 1 watermark
    one.step()
    assert again.state is RequestState.WAITING
    one.run()


def test_no_request_is_admitted_in_a_step_that_preempts(drive: Make) -> None:
    one = drive(num_blocks=6, block_size=4, max_num_seqs=2, prefix_caching=False)
    one.submit([1] * 7, 12)
    new = one.submit([2] * 7, 12)
    urgent: Any = None
    while not new.num_preemptions:
        assert one.scheduler.num_running in (0, 2)
        urgent = urgent or (one.submit([3], 1, priority=9) if one.step_count == 3 else None)
        one.step()
    assert urgent.state is RequestState.WAITING
    one.step()
    assert urgent.is_finished
    one.run()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (0, 5, "the prompt is empty: at least 1 token is needed"),
        (100, 29, r"100 prompt tokens and 29 new ones need 33 blocks of 4 tokens: the whole pool has 32"),
        (1, 128, r"1 prompt token and 128 new ones need 33 blocks of 4 tokens"),
        (128, 1, r"128 prompt tokens and 1 new one need 33 blocks of 4 tokens"),
        (500, 525, r"500 prompt tokens and 525 new ones make 1025 tokens: at most 1024"),
    ],
)
def test_request_that_can_never_run_is_refused_with_the_numbers(
    drive: Make, prompt: int, max_tokens: int, message: str
) -> None:
    one = drive()
    with pytest.raises(BadInput, match=message):
        one.scheduler.check_fits(one.request([1] * prompt, max_tokens))
    assert one.scheduler.totals.refused == 0
    with pytest.raises(BadInput, match=message):
        one.submit([1] * prompt, max_tokens)
    assert one.scheduler.totals.refused == 1
    assert not one.scheduler.requests
    (refusal,) = events(one, "refused")
    assert refusal.number == 2


def test_longest_possible_request_runs(drive: Make) -> None:
    one = drive(num_blocks=8, block_size=4)
    assert one.scheduler.max_request_tokens == 32
    request = one.submit(range(28), 4)
    one.run()
    assert len(request.output_token_ids) == 4
    with pytest.raises(BadInput):
        one.submit(range(28), 5)


def test_refused_requests_do_not_affect_the_requests_submitted_between_them(drive: Make) -> None:
    one = drive()
    good = []
    for number in range(10):
        with pytest.raises(BadInput):
            one.submit([1] * 500, 100)
        good.append(one.submit([number, number], 5))
    one.run()
    assert all(len(request.output_token_ids) == 5 for request in good)
    assert one.scheduler.totals.refused == 10


def test_newest_request_is_preempted_and_keeps_its_tokens(drive: Make, expected_completion: Make) -> None:
    one = drive(num_blocks=6, block_size=4, prefix_caching=False)
    old, new = one.submit([1] * 7, 12), one.submit([2] * 7, 12)
    while not new.num_preemptions:
        one.step()
    assert old.num_preemptions == 0
    assert new.state is RequestState.PREEMPTED
    assert new.block_table == []
    assert new.num_computed_tokens == 0
    kept = list(new.output_token_ids)
    assert kept
    one.run()
    assert new.output_token_ids[: len(kept)] == kept
    assert new.output_token_ids == expected_completion([2] * 7, 12)
    assert old.output_token_ids == expected_completion([1] * 7, 12)


def test_preemption_event_gives_the_reason(drive: Make) -> None:
    one = drive(num_blocks=6, block_size=4, prefix_caching=False)
    old, new = one.submit([1] * 7, 12), one.submit([2] * 7, 12)
    while not new.num_preemptions:
        one.step()
    (event,) = events(one, "preempted")
    assert (event.number, event.other) == (new.number, old.number)
    assert (event.num_blocks, event.num_tokens) == (3, 12)
    assert event.cause == (
        "request #1 needed 1 block and none was available; request #2 was chosen, being the newest;"
        " 12 tokens in 3 blocks to recompute"
    )
    one.run()
    (event,) = events(one, "resumed")
    assert event.number == new.number
    assert event.cause.startswith("resumed ")
    assert " after its preemption; 4 blocks needed; all 13 tokens to compute" in event.cause


def test_newest_request_preempts_itself_if_it_needs_the_block(drive: Make) -> None:
    one = drive(num_blocks=6, block_size=4, prefix_caching=False)
    old, new = one.submit([1] * 6, 12), one.submit([2] * 8, 12)
    while not new.num_preemptions:
        one.step()
    assert old.num_preemptions == 0
    (event,) = events(one, "preempted")
    assert (event.number, event.other) == (new.number, new.number)
    assert "it was itself the next to be preempted" in event.cause
    one.run()


def test_lowest_priority_is_preempted_first(drive: Make) -> None:
    one = drive(num_blocks=6, block_size=4, prefix_caching=False)
    low, high = one.submit([1] * 7, 12, priority=-1), one.submit([2] * 7, 12)
    while not low.num_preemptions:
        one.step()
    assert high.num_preemptions == 0
    (event,) = events(one, "preempted")
    assert "request #1 was chosen, having the lowest priority (-1)" in event.cause
    one.run()


@pytest.mark.parametrize(
    ("prompts", "num_blocks", "reason"),
    [
        (([1] * 7, [2] * 7), 6, "being the newest"),
        (([1] * 5, [2] * 7), 7, "its client held the most tokens"),
    ],
    ids=["equal", "unequal"],
)
def test_preemption_reason_names_the_client_only_if_it_held_more_tokens_than_others(
    drive: Make, prompts: Any, num_blocks: int, reason: str
) -> None:
    one = drive(num_blocks=num_blocks, block_size=4, prefix_caching=False)
    requests = [one.submit(prompt, 12, client=name) for prompt, name in zip(prompts, ("ann", "bob"), strict=True)]
    while not any(request.num_preemptions for request in requests):
        one.step()
    (event,) = events(one, "preempted")
    assert (event.number, event.other) == (2, 1)
    assert reason in event.cause
    one.run()


def test_preempted_request_is_removed_from_the_plan(drive: Make, expected_completion: Make) -> None:
    """A prefill of higher priority runs out of blocks after a decode of lower priority was scheduled."""
    one = drive(num_blocks=24, block_size=1, max_num_batched_tokens=5, prefix_caching=False)
    low = one.submit([1, 2, 3], 20)
    one.step()
    high = one.submit(range(10, 29), 2, priority=1)
    while not low.num_preemptions:
        plan, _ = one.step()
    assert tokens_by_request(plan) == {high.number: 3}
    assert high.num_preemptions == 0
    one.run()
    assert low.output_token_ids == expected_completion([1, 2, 3], 20)


def test_preempted_request_is_resumed_before_new_ones_are_admitted(drive: Make) -> None:
    one = drive(num_blocks=6, block_size=4, prefix_caching=False)
    one.submit([1] * 7, 12)
    new = one.submit([2] * 7, 12)
    later = one.submit([3] * 3, 1)
    while not new.num_preemptions:
        one.step()
    while later.state is RequestState.WAITING:
        assert new.admitted_ns is not None
        one.step()
        if later.state is not RequestState.WAITING:
            assert new.state is not RequestState.PREEMPTED
    one.run()


def test_preempted_request_finds_its_own_cached_blocks(drive: Make) -> None:
    one = drive(num_blocks=10, block_size=4)
    old, new = one.submit([1] * 15, 10), one.submit([2] * 15, 10)
    one.run()
    assert old.num_preemptions == 0
    assert new.num_preemptions == 1
    assert new.num_cached_tokens == 0, "only what the first admission found is told to the client"
    assert one.scheduler.totals.cached_tokens == 0, "what comes back after a preemption is no hit of a new prompt"
    assert one.scheduler.totals.restored_tokens == 16
    assert one.scheduler.totals.prompt_tokens == 15 + 15
    lost = one.scheduler.totals.restored_tokens + one.scheduler.totals.recomputed_tokens
    assert lost == 20, "the request had this many tokens when it was preempted"


@pytest.mark.parametrize("steps", range(6))
def test_abort_in_any_state_frees_everything(drive: Make, steps: int) -> None:
    one = drive(num_blocks=6, block_size=4, prefix_caching=False, max_num_batched_tokens=6)
    requests = [one.submit([number] * 7, 12) for number in range(3)]
    for _ in range(steps):
        one.step()
    for request in requests:
        one.scheduler.abort(request, one.now_ns)
        one.scheduler.abort(request, one.now_ns)
        assert request.finish_reason == "abort"
        one.scheduler.check_integrity()
    assert one.pool.num_free == 6
    assert one.scheduler.totals.aborted == 3
    assert len(events(one, "aborted")) == 3
    assert not one.step()[0].scheduled


def test_abort_between_schedule_and_commit_writes_nothing(drive: Make) -> None:
    one = drive()
    request = one.submit(range(10), 5)
    plan = one.scheduler.schedule(1, 1)
    one.scheduler.abort(request, 2)
    one.scheduler.commit(plan, 1, 0)
    one.scheduler.check_integrity()
    assert one.pool.num_free == one.pool.num_blocks
    assert request.num_computed_tokens == 0


def test_aborted_request_does_not_finish_as_well(drive: Make) -> None:
    one = drive()
    request = one.submit([1], 5)
    one.scheduler.abort(request, 1)
    one.scheduler.finish(request, "stop", 2)
    assert request.finish_reason == "abort"
    assert (one.scheduler.totals.aborted, one.scheduler.totals.finished) == (1, 0)


def test_cached_prompt_is_not_computed_again(drive: Make) -> None:
    one = drive(block_size=4)
    one.submit(range(10), 1)
    one.run()
    again = one.submit(range(10), 1)
    plan, _ = one.step()
    assert tokens_by_request(plan) == {2: 2}
    assert again.num_cached_tokens == 8
    assert one.scheduler.totals.cached_tokens == 8


def test_at_least_one_token_is_computed_for_a_fully_cached_prompt(drive: Make) -> None:
    one = drive(block_size=4)
    one.submit(range(8), 1)
    one.run()
    again = one.submit(range(8), 1)
    assert tokens_by_request(one.step()[0]) == {2: 4}
    assert again.num_cached_tokens == 4


def test_running_requests_share_a_prefix(drive: Make) -> None:
    one = drive(block_size=4)
    first = one.submit(range(12), 8)
    one.step()
    second = one.submit([*range(8), 40, 41], 8)
    one.step()
    assert second.block_table[:2] == first.block_table[:2]
    assert one.pool.ref_count(first.block_table[0]) == 2
    one.run()


def test_generated_tokens_are_cached_for_the_next_turn(drive: Make) -> None:
    one = drive(block_size=4)
    first = one.submit(range(6), 10)
    one.run()
    conversation = [*range(6), *first.output_token_ids, 9, 9, 9]
    second = one.submit(conversation, 2)
    one.step()
    assert second.num_cached_tokens == 12
    one.run()


def test_reset_prefix_cache_keeps_running_requests(drive: Make) -> None:
    one = drive(block_size=4)
    one.submit(range(12), 1)
    one.run()
    running = one.submit(range(100, 120), 10)
    one.step()
    assert one.scheduler.reset_prefix_cache(7) == 3
    assert events(one, "note")[0].cause == "the prefix cache was emptied: 3 cached blocks"
    again = one.submit(range(12), 1)
    one.run()
    assert again.num_cached_tokens == 0
    assert len(running.output_token_ids) == 10
    one.scheduler.reset_prefix_cache(one.now_ns)
    assert one.pool.num_free == one.pool.num_blocks


def test_eviction_is_one_event_per_step(drive: Make) -> None:
    one = drive(num_blocks=6, block_size=4)
    one.submit(range(15), 1)
    one.run()
    one.submit(range(100, 115), 1)
    one.run()
    (event,) = events(one, "evicted")
    assert (event.num_blocks, event.other) == (1, 2)
    assert event.cause == "no block was free; the least recently used cached block was evicted for request #2"
    assert one.pool.evicted_blocks == 1


@pytest.mark.parametrize("length", [5, 8, 9])
def test_forks_share_blocks_until_one_writes(drive: Make, expected_completion: Make, length: int) -> None:
    one = drive(block_size=4)
    parent = one.submit(range(length), 7)
    one.step()
    one.step()
    children = [one.fork(parent) for _ in range(2)]
    one.scheduler.check_integrity()
    assert children[0].block_table == parent.block_table
    assert children[0].block_table is not parent.block_table
    plan, _ = one.step()
    written_at = (length + 1) % 4  # slot of the first token that the parent and each child write
    assert len(plan.copies) == (2 if written_at else 0)
    one.run()
    for request in (parent, *children):
        assert request.output_token_ids == expected_completion(range(length), 7)
    assert one.pool.num_active == 0


def test_fork_beyond_max_num_seqs_waits(drive: Make, expected_completion: Make) -> None:
    one = drive(max_num_seqs=1)
    parent = one.submit(range(6), 4)
    one.step()
    child = one.fork(parent)
    assert child.state is RequestState.WAITING
    assert child.block_table == []
    one.run()
    assert child.output_token_ids == expected_completion(range(6), 4)


def test_fork_that_cannot_copy_preempts_the_newest(drive: Make, expected_completion: Make) -> None:
    one = drive(num_blocks=3, block_size=4, prefix_caching=False)
    parent = one.submit(range(9), 3)
    one.step()
    child = one.fork(parent)
    one.step()
    assert child.num_preemptions == 1
    one.run()
    for request in (parent, child):
        assert request.output_token_ids == expected_completion(range(9), 3)


def test_admission_event_gives_the_cached_tokens(drive: Make) -> None:
    one = drive(block_size=4)
    one.submit(range(10), 1)
    one.run()
    one.scheduler.changes.drain_events()
    one.submit(range(10), 1)
    one.step()
    (event,) = events(one, "admitted")
    assert (event.num_blocks, event.num_tokens) == (3, 8)
    assert event.cause.endswith("3 blocks needed; 8 of 10 tokens were there already, 2 blocks in the pool")


def test_totals_count_admissions_preemptions_and_ends(drive: Make) -> None:
    one = drive(num_blocks=6, block_size=4, prefix_caching=False)
    requests = [one.submit([number] * 7, 12) for number in range(2)]
    one.run()
    totals = one.scheduler.totals
    assert totals.prompt_tokens == 7 * 2, "a prompt counts once"
    assert totals.cached_tokens == totals.restored_tokens == 0
    assert 7 * totals.preemptions <= totals.recomputed_tokens <= (7 + 12) * totals.preemptions
    assert totals.admitted == totals.finished == 2
    assert totals.preemptions == sum(r.num_preemptions for r in requests) > 0
    assert totals.aborted == totals.refused == 0


def test_freed_source_of_a_copy_is_not_the_target_of_another(drive: Make, expected_completion: Make) -> None:
    """The copies of a step run in any order, so that the source of a copy must not be a target.

    Requests 1 and 4 share a partial block, and so do 2 and 3. Request 1 copies its block into the last free one. For
    the copy of 2, request 4 is preempted, which frees the block that 1 copies from.
    """
    one = drive(num_blocks=5, block_size=4, prefix_caching=False)
    first, second = one.submit([1] * 5, 8), one.submit([2] * 5, 8)
    one.step()
    third = one.fork(second)
    fourth = one.fork(first)
    assert one.scheduler.num_running == 4
    plan, _ = one.step()
    assert fourth.num_preemptions == 1
    assert len(plan.copies) == 1
    one.run()
    for request in (first, second, third, fourth):
        assert request.output_token_ids == expected_completion(request.prompt_token_ids, 8)


def test_client_without_running_requests_preempts_one_of_a_client_with_several(drive: Make) -> None:
    one = drive(max_num_seqs=3)
    many = [one.submit([n, n], 40, client="many") for n in range(8)]
    one.step()
    few = one.submit([20, 20], 5, client="few")
    plan, _ = one.step()
    assert few.number in tokens_by_request(plan)
    assert [request.state for request in many[:3]] == [RequestState.RUNNING] * 2 + [RequestState.PREEMPTED]
    (event,) = events(one, "preempted")
    assert (event.number, event.other) == (3, few.number)
    assert f"to let request #{few.number} start (its client had no running request)" in event.cause
    second = one.submit([21, 21], 5, client="few")
    one.step()
    assert second.state is RequestState.WAITING, "a client with a running request must wait for its turn"
    one.run()
    assert {request.finish_reason for request in [*many, few, second]} == {"length"}


def test_batch_without_running_requests_preempts_one_of_the_same_client(drive: Make) -> None:
    one = drive(max_num_seqs=3)
    for n in range(6):
        one.submit([n, n], 40, batch="long")
    one.step()
    alone = one.submit([20, 20], 5)
    assert alone.number in tokens_by_request(one.step()[0])
    for n in range(4):
        one.submit([30 + n], 5)
    running = {request.number for request in one.scheduler.requests.values() if request.state is RequestState.RUNNING}
    assert running == {1, 2, alone.number}
    one.step()
    assert sum(request.batch == "long" for request in one.scheduler.requests.values() if request.block_table) == 1
    one.run()


def test_fairness_preempts_as_many_as_needed_or_none(drive: Make) -> None:
    one = drive(num_blocks=20, block_size=4, max_num_batched_tokens=64, prefix_caching=False)
    many = [one.submit(range(10 * n, 10 * n + 7), 20, client="many") for n in range(8)]
    one.step()
    assert all(request.state is RequestState.RUNNING for request in many)
    few = one.submit(range(30), 4, client="few")
    one.step()
    assert few.state is RequestState.RUNNING
    assert 2 <= sum(request.state is RequestState.PREEMPTED for request in many) <= 4
    one.run()


def test_fairness_never_preempts_higher_priority(drive: Make) -> None:
    one = drive(max_num_seqs=2)
    for n in range(2):
        one.submit([n, n], 10, client="many", priority=1)
    one.step()
    low = one.submit([9], 2, client="few")
    one.step()
    assert low.state is RequestState.WAITING
    one.run()


def test_client_holding_the_most_tokens_is_preempted_first(drive: Make) -> None:
    one = drive(num_blocks=12, block_size=4, max_num_batched_tokens=64, prefix_caching=False)
    for n in range(3):
        one.submit(range(10 * n, 10 * n + 9), 12, client="many")
    few = one.submit([40] * 6, 12, client="few")
    one.run()
    assert few.num_preemptions == 0
    assert one.scheduler.totals.preemptions > 0


def test_clients_are_served_fairly_with_async_scheduling(drive: Make, expected_completion: Make) -> None:
    one = drive(max_num_seqs=3)
    many = [one.submit([n, n], 30, client="many") for n in range(5)]
    for _ in range(4):
        one.step(ahead=True)
    few = one.submit([20, 20], 5, client="few")
    for _ in range(3):
        one.step(ahead=True)
    assert few.admitted_ns is not None
    one.settle()
    one.run()
    for request in [*many, few]:
        assert request.output_token_ids == expected_completion(request.prompt_token_ids, request.max_tokens)
