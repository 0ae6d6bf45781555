"""Swap, offload, eviction to disk, loading and loss: effects on blocks, slots, requests and events."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvscope_engine.policy.scheduling.plan_builder import PlanBuilder
from kvscope_telemetry.ledger import BlockState, Tier
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Event, Moves

Make = Callable[..., Any]  # fixture of tests/engine/conftest.py


def events(one: Any, kind: str) -> list[Event]:
    return [event for event in one.scheduler.changes.drain_events() if event.kind == kind]


def prompts(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    return [[rng.randrange(50) for _ in range(rng.randrange(4, longest))] for _ in range(count)]


def step_until_preempted(one: Any, request: Any) -> None:
    while not request.num_preemptions:
        one.step()


@pytest.mark.storm({"num_disk": 0, "prefix_caching": False})
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_disk", [0, 200])
def test_random_load_over_all_tiers_gives_the_right_tokens(
    drive: Make, expected_completion: Make, prefix_caching: bool, num_disk: int
) -> None:
    """Half of the blocks fit only in lower tiers; each token still sees the right context."""
    rng = random.Random(5)
    one = drive(
        num_blocks=24,
        block_size=4,
        max_num_seqs=12,
        prefix_caching=prefix_caching,
        num_host=12 if num_disk else 100,
        num_disk=num_disk,
    )
    requests = []
    for prompt in prompts(rng, 30, 24):
        requests += one.siblings(prompt, 20, rng.choice([0, 0, 2]))
        one.step()
    one.run()
    for request in requests:
        assert request.output_token_ids == expected_completion(request.prompt_token_ids, 20)
    totals = one.scheduler.totals
    assert totals.swapped_blocks > 20
    assert totals.loaded_blocks > 20
    assert (totals.offloaded_blocks > 0) == prefix_caching
    assert totals.lost_blocks == 0
    disk = one.pool.ledger.part(24 + one.pool.num_host, 24 + one.pool.num_host + num_disk)
    assert bool(disk.last_used_step.any()) == bool(num_disk)
    one.scheduler.reset_prefix_cache(0)
    assert (one.pool.ledger.state == BlockState.FREE).all()
    one.scheduler.check_integrity()


@pytest.mark.storm(*({"seed": seed} for seed in range(1, 5)))
@pytest.mark.parametrize("seed", range(6))
def test_random_load_with_a_failing_disk_gives_the_right_tokens(
    drive: Make, expected_completion: Make, seed: int
) -> None:
    """A third of the disk slots cannot be read: their contents are recomputed and counted as lost."""
    rng = random.Random(seed)
    one = drive(num_blocks=20, block_size=4, max_num_seqs=10, num_host=6, num_disk=120)
    requests = []
    for step, prompt in enumerate(prompts(rng, 30, 20)):
        one.mover.bad |= set(rng.sample(range(120), 40))
        if seed == 5 and step == 15:
            one.mover.failure = "no space left on the drive"
        requests.append(one.submit(prompt, 20))
        one.step()
    one.run()
    for request in requests:
        assert request.output_token_ids == expected_completion(request.prompt_token_ids, 20)
    assert one.scheduler.totals.lost_blocks > 0
    notes = [event.cause for event in events(one, "note")]
    assert notes == (["the disk tier is off from now on: no space left on the drive"] if seed == 5 else [])


def test_swapped_request_reports_where_its_blocks_are(drive: Make) -> None:
    one = drive(num_blocks=6, block_size=4, prefix_caching=False, num_host=10)
    old, new = one.submit([1] * 7, 12), one.submit([2] * 7, 12)
    step_until_preempted(one, new)
    assert new.state is RequestState.PREEMPTED
    assert not new.block_table
    assert [one.pool.ledger.tier[row] for row in new.saved_rows] == [Tier.HOST] * 3
    assert one.pool.ledger.owner[new.saved_rows].tolist() == [new.number] * 3
    assert one.pool.ledger.filled[new.saved_rows].tolist() == [4, 4, 4]
    (event,) = events(one, "preempted")
    assert event.cause == (
        "request #1 needed 1 block and none was available; request #2 was chosen, being the newest;"
        " 12 tokens in 3 blocks swapped to a lower tier (about 0.0 ms round trip)"
    )
    moves = one.scheduler.changes.drain().moves
    assert np.frombuffer(moves.saved, "<u4").tolist() == new.saved_rows
    one.run()
    assert not new.saved_rows
    (event,) = events(one, "resumed")
    assert "12 of 13 tokens were there already, 0 blocks in the pool; 3 blocks loaded from lower tiers" in event.cause
    assert len(one.scheduler.changes.drain().moves.loaded) == 3 * 4
    assert old.is_finished


def test_swap_avoids_recomputation(drive: Make) -> None:
    one = drive(num_blocks=12, block_size=4, prefix_caching=False, num_host=40)
    requests = [one.submit([number] * 13, 16) for number in range(4)]
    one.run()
    assert one.scheduler.totals.preemptions > 0
    assert one.scheduler.totals.prompt_tokens == sum(request.num_prompt_tokens for request in requests)


def test_cheaper_of_swap_and_recomputation_is_chosen(drive: Make) -> None:
    for seconds_per_block, is_swapped in ((1e-6, True), (1.0, False)):
        one = drive(num_blocks=6, block_size=4, prefix_caching=False, num_host=10, preemption="auto")
        one.mover.seconds_per_block = seconds_per_block
        plan = one.submit([1] * 20, 1)
        one.scheduler.prefill_rate.observe(one.step()[0], 20 * 1e-3)
        assert plan.is_finished
        one.submit([1] * 7, 12)
        new = one.submit([2] * 7, 12)
        step_until_preempted(one, new)
        assert bool(new.saved_rows) == is_swapped
        (event,) = events(one, "preempted")
        assert "about 12.0 ms" in event.cause
        one.run()


def test_swap_without_space_falls_back_to_recomputation(drive: Make, expected_completion: Make) -> None:
    one = drive(num_blocks=6, block_size=4, prefix_caching=False, num_host=2)
    one.submit([1] * 7, 12)
    new = one.submit([2] * 7, 12)
    step_until_preempted(one, new)
    assert not new.saved_rows
    one.run()
    assert new.output_token_ids == expected_completion([2] * 7, 12)


def test_aborted_swapped_request_leaves_nothing(drive: Make) -> None:
    one = drive(num_blocks=6, block_size=4, prefix_caching=False, num_host=10)
    one.submit([1] * 7, 12)
    new = one.submit([2] * 7, 12)
    step_until_preempted(one, new)
    one.scheduler.abort(new, one.now_ns)
    one.scheduler.check_integrity()
    assert (one.pool.ledger.state[6:] == BlockState.FREE).all()


def test_evicted_prefixes_are_offloaded_and_loaded_on_a_hit(drive: Make) -> None:
    """They move through host memory to disk, and the event reports it."""
    one = drive(num_blocks=8, block_size=4, num_host=4, num_disk=20)
    for family in range(5):
        one.submit([family] * 20 + [9], 1)
        one.run()
    states = one.pool.ledger.state
    assert (states[8 + 4 :] == BlockState.CACHED).any()
    one.scheduler.changes.drain_events()
    first = one.submit([0] * 20 + [8], 1)
    one.run()
    assert first.num_cached_tokens == 20
    (event,) = events(one, "admitted")
    assert "20 of 21 tokens were there already, 0 blocks in the pool; 5 blocks loaded from lower tiers" in event.cause


def test_cached_blocks_are_dropped_if_the_drive_is_busy_but_swapped_ones_are_written(
    drive: Make, expected_completion: Make
) -> None:
    """Prefixes are dropped instead, but what a swapped request needs is still written."""
    one = drive(num_blocks=14, block_size=4, num_host=6, num_disk=20)
    one.mover.num_offloadable = 0
    for family in range(5):
        one.submit([family] * 40 + [9], 1)
        one.run()
    assert (one.pool.ledger.state[14 + 6 :] == BlockState.FREE).all()
    requests = [one.submit([family] * 9, 12) for family in range(5, 12)]
    one.run()
    assert one.scheduler.totals.swapped_blocks > 3
    assert one.pool.ledger.last_used_step[14 + 6 :].any()
    for request in requests:
        assert request.output_token_ids == expected_completion(request.prompt_token_ids, 12)


def test_loading_that_costs_more_than_computing_is_skipped(drive: Make) -> None:
    one = drive(num_blocks=8, block_size=4, num_host=40)
    one.mover.seconds_per_block = 1.0
    for family in range(3):
        one.submit([family] * 20 + [9], 1)
        one.scheduler.prefill_rate.observe(one.step()[0], 1e-3)
        one.run()
    again = one.submit([0] * 20 + [8], 1)
    one.run()
    assert again.num_cached_tokens == 0


def test_request_preempted_before_its_block_copy_saves_the_block_to_be_copied(
    drive: Make, expected_completion: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has not been made: the block to be saved is the one that would have been copied."""
    found = []
    original = PlanBuilder.content_of

    def content_of(draft: PlanBuilder, block: int) -> int:
        found.append(original(draft, block) != block)
        return original(draft, block)

    monkeypatch.setattr(PlanBuilder, "content_of", content_of)
    for num_blocks in range(9, 12):
        for length in range(3, 8):
            one = drive(num_blocks=num_blocks, prefix_caching=False, num_host=60, max_num_batched_tokens=14)
            parent = one.submit([7] * length, 12)
            one.step()
            one.step()
            other = one.submit([8] * 22, 1)  # its prefill continues after decodes, while the forks copy
            one.step()
            children = [one.fork(parent) for _ in range(3)]
            one.run()
            assert other.is_finished
            for request in (parent, *children):
                assert request.output_token_ids == expected_completion([7] * length, 12)
    assert any(found), "no request was preempted in the step of its copy"


def test_preemptions_are_spread_over_all_requests(drive: Make) -> None:
    one = drive(num_blocks=16, block_size=2, prefix_caching=False, max_num_seqs=6)
    requests = [one.submit([number] * 4, 24) for number in range(6)]
    while one.scheduler.requests:
        before = [(request, request.num_preemptions) for request in requests if request.state is RequestState.RUNNING]
        one.step()
        preempted = [count for request, count in before if request.num_preemptions > count]
        spared = [count for request, count in before if request.num_preemptions == count and not request.is_finished]
        assert not preempted or not spared or max(preempted) <= min(spared)
    assert one.scheduler.totals.preemptions > 5


def test_no_block_moves_are_reported_if_no_block_was_moved(drive: Make) -> None:
    one = drive()
    one.submit([1], 2)
    one.run()
    assert one.scheduler.changes.drain().moves == Moves()


@pytest.mark.parametrize(
    ("before", "prompt", "reason"),
    [
        ([[1] * 12], [2] * 12, "it first differs from what is cached at token 0"),
        ([[1] * 12], [1, 1, 1, 1, 1, 1, 3, 1, 1, 1, 1, 1], "it first differs from what is cached at token 6"),
        ([[1] * 9], [1] * 20, "no cached prefix continues after token 8"),
        ([], [1] * 12, "no cached prefix matches"),
        ([[1] * 12, [2] * 30], [1] * 13, "the block from token 4 was evicted at step 2"),
    ],
)
def test_prefix_miss_gives_its_reason(drive: Make, before: list[list[int]], prompt: list[int], reason: str) -> None:
    one = drive(num_blocks=9, block_size=4)
    for earlier in before:
        one.submit(earlier, 1)
        one.run()
    one.scheduler.changes.drain_events()
    one.submit(prompt, 1)
    one.step()
    (event,) = events(one, "admitted")
    assert event.cause.endswith(f"not more, since {reason}")


def test_completions_of_one_prompt_compute_it_once(drive: Make, expected_completion: Make) -> None:
    one = drive(prefix_caching=False, max_num_batched_tokens=5)
    requests = one.siblings([3] * 11, 6, 3)
    one.step()
    assert [request.state for request in requests] == [RequestState.RUNNING] + [RequestState.WAITING] * 3
    assert one.scheduler.num_waiting == 3
    one.run()
    assert one.scheduler.totals.prompt_tokens == 11 + 3, "each of the others computes the last token alone"
    assert one.scheduler.totals.copied_blocks == 3
    for request in requests:
        assert request.output_token_ids == expected_completion([3] * 11, 6)
        assert request.num_cached_tokens == (0 if request is requests[0] else 10)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_completions_continue_if_the_first_is_aborted(drive: Make, expected_completion: Make, steps: int) -> None:
    one = drive(max_num_batched_tokens=5)
    requests = one.siblings([3] * 11, 6, 2)
    for _ in range(steps):
        one.step()
    one.scheduler.abort(requests[0], one.now_ns)
    one.scheduler.check_integrity()
    one.run()
    for request in requests[1:]:
        assert request.output_token_ids == expected_completion([3] * 11, 6)


def test_waiting_completion_can_be_aborted(drive: Make) -> None:
    one = drive(max_num_batched_tokens=5)
    requests = one.siblings([3] * 11, 6, 2)
    one.step()
    one.scheduler.abort(requests[1], one.now_ns)
    assert one.scheduler.num_waiting == 1
    one.run()
    assert requests[2].finish_reason == "length"


@pytest.mark.parametrize("num_blocks", [8, 13])
def test_load_does_not_overwrite_the_source_of_a_copy(drive: Make, expected_completion: Make, num_blocks: int) -> None:
    """Copies run after loads: a block that the last sibling copies from is evicted in the same step."""
    one = drive(num_blocks=num_blocks, block_size=4, max_num_batched_tokens=200, num_host=60)
    for prompt in ([9] * (4 * num_blocks - 7), [8] * (4 * num_blocks - 3)):
        one.submit(prompt, 1)  # the second request evicts the first one's blocks
        one.run()
    siblings = [request for family in (5, 6, 7) for request in one.siblings([family] * 4, 1, 1)]
    one.step()  # the first of each pair ends; the others copy the block that they shared
    loading = one.submit([9] * (4 * num_blocks - 16), 1)
    one.step()
    assert one.scheduler.totals.loaded_blocks > 0
    one.run()
    for request in (*siblings, loading):
        assert request.output_token_ids == expected_completion(request.prompt_token_ids, 1)


def test_partly_filled_block_of_a_preempted_request_is_loaded_from_its_saved_copy(
    drive: Make, expected_completion: Make
) -> None:
    """The pool holds the same text completely, but a shared block would have to be copied, without space for it."""
    one = drive(num_blocks=3, block_size=4, max_num_batched_tokens=6, num_host=30)
    parent = one.submit([1] * 10, 1)
    one.step()
    child = one.fork(parent)
    step_until_preempted(one, child)
    assert child.num_saved_tokens == 6
    assert [one.scheduler.prefix_of(row) is not None for row in child.saved_rows] == [True, False]
    one.run()
    assert child.num_preemptions == 1
    assert child.output_token_ids == expected_completion([1] * 10, 1)


def test_prefix_evicted_from_the_last_tier_is_reported_as_evicted(drive: Make) -> None:
    one = drive(num_blocks=8, block_size=4, num_host=4)
    for family in range(4):
        one.submit([family] * 20 + [9], 1)
        one.run()
    one.scheduler.changes.drain_events()
    one.submit([0] * 20 + [8], 1)
    one.step()
    (event,) = events(one, "admitted")
    assert "not more, since the block from token 0 was evicted at step" in event.cause
