"""Slots of recurrent states: requests continue from their own, prefixes from checkpoints, and none is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvscope_engine.policy.kv_groups import ONE_GROUP, GroupRule
from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.request_state import RequestState

Drive = Any


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(50), k=length)


def num_cached(drive: Drive, ids: Sequence[int], max_tokens: int = 2) -> int:
    """Return the number of cached tokens of a prompt that ran alone."""
    request = drive.submit(ids, max_tokens)
    drive.run()
    assert isinstance(request.num_cached_tokens, int)
    return request.num_cached_tokens


def check_at_rest(drive: Drive) -> None:
    states = drive.scheduler.states
    assert states.num_free + states.num_checkpoints == states.num_slots
    assert states.num_free_host + states.num_host_checkpoints == states.num_host_slots


def test_same_prompt_resumes_before_its_last_full_block(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=4, state_interval=1024)
    assert [num_cached(here, prompt(1, 30)) for _ in range(2)] == [0, 28]
    assert num_cached(here, prompt(1, 28)) == 0, "the checkpoint is at its end, but one token must be computed"
    assert num_cached(here, prompt(1, 28)) == 24, "it now has a checkpoint of its own"
    check_at_rest(here)


def test_conversation_resumes_at_the_end_of_its_last_prompt(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=4, state_interval=1024)
    first = here.submit(prompt(1, 30), 5)
    here.run()
    following = [*first.prompt_token_ids, *first.output_token_ids, *prompt(2, 20)]
    assert num_cached(here, following) == 28
    check_at_rest(here)


def test_states_are_saved_at_an_interval_and_where_texts_diverge(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=16, state_interval=16)
    shared = prompt(1, 30)
    found = [num_cached(here, shared + prompt(seed, 30)) for seed in (2, 3, 4)]
    assert found == [0, 16, 28], "the second found blocks of 28 tokens and a state after 16, and saved one after 28"
    check_at_rest(here)


def test_least_recently_used_state_is_evicted_first(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=3, max_num_seqs=1, state_interval=1024)
    texts = [prompt(seed, 30) for seed in range(3)]
    found = [num_cached(here, texts[number]) for number in (0, 1, 0, 2, 0, 1)]
    assert found == [0, 0, 28, 0, 28, 0]
    assert here.scheduler.states.num_evicted
    check_at_rest(here)


def test_no_state_is_saved_without_a_prefix_cache(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=4, prefix_caching=False)
    assert [num_cached(here, prompt(1, 30)) for _ in range(2)] == [0, 0]
    assert here.scheduler.states.num_free == 4


def test_no_request_starts_without_a_state_slot(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=2, max_num_seqs=8)
    for seed in range(6):
        here.submit(prompt(seed, 20), 6)
    here.step()
    assert here.scheduler.num_running == 2
    here.run()
    check_at_rest(here)


def test_running_requests_have_adjacent_slots(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=12, state_interval=1024)
    requests = []
    for seed in range(4):
        requests.append(here.submit(prompt(seed, 20), 9))
        here.step()
    assert here.scheduler.states.num_checkpoints
    assert [request.state_slot for request in requests] == [0, 1, 2, 3]
    here.run()
    check_at_rest(here)


def test_fork_continues_from_a_copy_of_the_state(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=6)
    parent = here.submit(prompt(1, 21), 12)
    here.step()
    here.step()
    child = here.fork(parent)
    assert child.state is not RequestState.RUNNING or child.state_slot != parent.state_slot
    here.run()
    assert child.output_token_ids == parent.output_token_ids
    check_at_rest(here)


def test_reset_prefix_cache_drops_saved_states(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=6)
    num_cached(here, prompt(1, 40))
    here.scheduler.reset_prefix_cache(here.now_ns)
    assert here.scheduler.states.num_free == 6
    assert num_cached(here, prompt(1, 40)) == 0


BELOW = {"num_host": 24, "num_host_states": 4, "preemption": "swap"}


def swapped_out(drive: Drive, ids: Sequence[int]) -> Request:
    """Return a request that ran for some steps and was swapped to host memory with its blocks and state."""
    request = drive.submit(ids, 20)
    for _ in range(4):
        drive.step()
    record = drive.scheduler.preempt(request, "swap", "a person", drive.now_ns)
    assert record is not None
    assert record.is_swapped
    assert isinstance(request, Request)
    return request


def test_swapped_request_recomputes_nothing(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=2, **BELOW)
    request = swapped_out(here, prompt(1, 21))
    states, num_tokens = here.scheduler.states, request.num_saved_tokens
    row = here.pool.first_state + request.saved_state_slot
    assert (request.state_slot, request.state_tables) == (-1, ([row],))
    assert here.pool.ledger.filled[row] == num_tokens == 24
    here.scheduler.check_integrity()
    here.run()
    totals = here.scheduler.totals
    assert (states.num_swapped, totals.recomputed_tokens, totals.restored_tokens) == (1, 0, num_tokens)
    words = [event.cause for event in here.scheduler.changes.drain_events()]
    assert any("24 tokens in 6 blocks and a recurrent state swapped to a lower tier" in cause for cause in words), words
    assert any("the recurrent state loaded from lower tiers" in cause for cause in words), words
    check_at_rest(here)


def test_aborted_request_leaves_host_memory(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=2, **BELOW)
    here.scheduler.abort(swapped_out(here, prompt(1, 21)), here.now_ns)
    here.scheduler.check_integrity()
    check_at_rest(here)


def test_blocks_and_state_are_swapped_together_or_not_at_all(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=4, **BELOW | {"num_host_states": 1})
    first, second = (here.submit(prompt(seed, 14), 20) for seed in (1, 2))
    here.step()
    assert here.scheduler.preempt(first, "swap", "a person", here.now_ns)
    assert here.scheduler.preempt(second, "swap", "a person", here.now_ns) is None, "no state is dropped for another's"
    assert second.state is RequestState.RUNNING
    assert not second.saved_tables
    here.scheduler.check_integrity()
    record = here.scheduler.preempt(second, "", "a person", here.now_ns)
    assert not record.is_swapped
    here.run()
    check_at_rest(here)


def test_states_are_recomputed_without_host_slots(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=3, **BELOW | {"num_host_states": 0})
    request = here.submit(prompt(1, 21), 20)
    here.step()
    assert here.scheduler.preempt(request, "swap", "a person", here.now_ns) is None
    assert here.scheduler.preempt(request, "", "a person", here.now_ns).swap_seconds is None
    here.run()
    check_at_rest(here)


def test_swap_cost_includes_the_state(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=3, **BELOW | {"preemption": "auto"})
    swapped = []
    for copy_seconds in (0.1, 10.0):
        here.scheduler.states.copy_seconds = copy_seconds
        request = here.submit(prompt(1, 21), 20)
        plan, _ = here.step()
        here.scheduler.prefill_rate.observe(plan, plan.num_tokens / 10.0)
        record = here.scheduler.preempt(request, "", "a person", here.now_ns)
        assert record.swap_seconds > 2 * copy_seconds
        swapped.append(record.is_swapped)
        here.run()
    assert swapped == [True, False]
    check_at_rest(here)


def test_saved_state_is_offloaded_to_host_memory(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=2, num_blocks=64, max_num_seqs=1, state_interval=1024, **BELOW)
    texts = [prompt(seed, 30) for seed in range(4)]
    assert [num_cached(here, text) for text in texts] == [0] * 4
    assert here.scheduler.states.num_offloaded == 3, "one is on the device, where nobody needs its slot"
    assert [num_cached(here, text) for text in texts] == [28] * 4
    words = [event.cause for event in here.scheduler.changes.drain_events()]
    assert any(
        "cached state was evicted for request #" in cause and "1 moved to host memory" in cause for cause in words
    )
    check_at_rest(here)


def test_least_recently_used_state_leaves_host_memory(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=2, num_blocks=64, max_num_seqs=1, state_interval=1024, **BELOW | {"num_host_states": 2})
    texts = [prompt(seed, 30) for seed in range(5)]
    for text in texts:
        num_cached(here, text)
    assert here.scheduler.states.num_host_checkpoints == 2
    assert [num_cached(here, texts[number]) for number in (4, 2, 0)] == [28, 28, 0]
    check_at_rest(here)


@pytest.mark.parametrize("on_disk", [False, True])
def test_offloaded_blocks_are_hit_together_with_their_state(drive: Callable[..., Drive], on_disk: bool) -> None:
    """They are loaded only if that is faster than computing them."""
    tiers = {"num_host": 9, "num_disk": 60} if on_disk else {"num_host": 60}
    here = drive(num_states=2, max_num_seqs=1, num_blocks=9, state_interval=1024, **BELOW | tiers)
    texts = [prompt(seed, 30) for seed in range(4)]
    for text in texts:
        num_cached(here, text)
    assert num_cached(here, texts[0]) == 28
    assert here.scheduler.totals.loaded_blocks == 7
    request = here.submit(prompt(9, 30), 2)
    plan, _ = here.step()
    here.scheduler.prefill_rate.observe(plan, plan.num_tokens / 10.0)
    here.run()
    assert request.is_finished
    here.scheduler.states.copy_seconds = 3.0
    assert num_cached(here, texts[1]) == 0, "28 tokens take 2.8 seconds"
    here.scheduler.states.copy_seconds = 2.0
    assert num_cached(here, texts[2]) == 28
    here.mover.seconds_per_block = 1.0
    assert num_cached(here, texts[3]) == 0
    check_at_rest(here)


def test_unreadable_block_limits_the_hit_to_an_earlier_state(drive: Callable[..., Drive]) -> None:
    here = drive(
        num_states=30, num_blocks=9, max_num_seqs=1, state_interval=8, **BELOW | {"num_host": 9, "num_disk": 60}
    )
    first = prompt(1, 30)
    for text in (first, *(prompt(seed, 30) for seed in range(2, 6))):
        num_cached(here, text)
    tiers, index = here.scheduler.tiers, here.pool.index
    digests: list[bytes] = []
    index.extend(digests, first[:28], "", b"")
    rows = [tiers.find(digest) for digest in digests]
    assert all(tiers.is_on_disk(row) for row in rows)
    here.mover.bad = {rows[4] - tiers.disk.first}
    assert num_cached(here, first) == 16, "4 blocks are left, and a state is saved every 8 tokens"
    assert here.scheduler.totals.lost_blocks
    check_at_rest(here)


@pytest.mark.parametrize("below", [{}, {"num_host": 12, "num_host_states": 3}, {"num_host": 5, "num_disk": 40}])
@pytest.mark.parametrize("seed", range(12))
def test_random_load_continues_each_request_from_its_own_state(
    drive: Callable[..., Drive],
    expected_completion: Callable[[Sequence[int], int], list[int]],
    seed: int,
    below: dict[str, int],
) -> None:
    """With and without lower tiers: requests are swapped and resumed, and saved states are offloaded."""
    chance = random.Random(seed)
    if below:
        below = {"num_host_states": chance.choice((0, 1, 4))} | below
    shape = {"num_states": chance.choice((3, 5, 9)), "num_blocks": chance.choice((20, 40)), "max_num_seqs": 4}
    how = chance.choice(("swap", "auto")) if below else "recompute"
    groups = chance.choice((ONE_GROUP, (GroupRule(window=9),), (GroupRule(), GroupRule(window=6))))
    shape["num_blocks"] *= len(groups)
    here = drive(**shape, **below, state_interval=chance.choice((4, 16, 64)), preemption=how, groups=groups)
    requests: list[Request] = []
    for _ in range(120):
        what = chance.random()
        ids = prompt(chance.randrange(3), chance.randint(1, 30)) + prompt(chance.randrange(9), chance.randint(0, 12))
        if what < 0.4:
            requests.append(here.submit(ids, chance.randint(1, 16)))
        elif what < 0.5:
            requests += here.siblings(ids, chance.randint(1, 8), 2)
        elif what < 0.55 and (running := [each for each in requests if each.state is RequestState.RUNNING]):
            here.scheduler.preempt(chance.choice(running), "", "a person", here.now_ns)
        elif what < 0.6:
            here.scheduler.reset_prefix_cache(here.now_ns)
        elif what < 0.72:
            here.mover.bad = set(chance.sample(range(30), 20))
        elif what < 0.76:
            here.mover.seconds_per_block, here.scheduler.states.copy_seconds = chance.choices((1e-6, 1.0), k=2)
        victim = chance.choice(requests) if requests and chance.random() < 0.05 else None
        here.step(abort=victim)
    here.run()
    for request in requests:
        if request.finish_reason == "length":
            assert request.output_token_ids == expected_completion(request.prompt_token_ids, request.max_tokens)
    states, num_below = here.scheduler.states, here.pool.num_host_states
    assert states.num_kept > 0
    assert states.num_restored > 0 or shape["num_states"] < 5, "with few slots, others need them"
    assert (states.num_swapped + states.num_offloaded > 0) == (num_below > 0)
    check_at_rest(here)
