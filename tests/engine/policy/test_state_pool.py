"""Slots of recurrent states: whoever runs goes on from its own, prefixes from what was kept, and none is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.request_state import RequestState

Drive = Any


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(50), k=length)


def num_cached(drive: Drive, ids: Sequence[int], max_tokens: int = 2) -> int:
    """Tokens of a prompt that were found, when it ran alone."""
    request = drive.submit(ids, max_tokens)
    drive.run()
    assert isinstance(request.num_cached_tokens, int)
    return request.num_cached_tokens


def check_at_rest(drive: Drive) -> None:
    states = drive.scheduler.states
    assert states.num_free + states.num_checkpoints == states.num_slots


def test_the_same_prompt_goes_on_before_its_last_full_block(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=4, state_interval=1024)
    assert [num_cached(here, prompt(1, 30)) for _ in range(2)] == [0, 28]
    assert num_cached(here, prompt(1, 28)) == 0, "that place is its end: one token is left to compute"
    assert num_cached(here, prompt(1, 28)) == 24, "now it left one of its own"
    check_at_rest(here)


def test_a_conversation_goes_on_where_its_last_prompt_ended(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=4, state_interval=1024)
    first = here.submit(prompt(1, 30), 5)
    here.run()
    following = [*first.prompt_token_ids, *first.output_token_ids, *prompt(2, 20)]
    assert num_cached(here, following) == 28
    check_at_rest(here)


def test_states_are_kept_at_an_interval_and_where_texts_part(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=16, state_interval=16)
    shared = prompt(1, 30)
    found = [num_cached(here, shared + prompt(seed, 30)) for seed in (2, 3, 4)]
    assert found == [0, 16, 28], "the second found blocks of 28 tokens and a state after 16: it kept one there"
    check_at_rest(here)


def test_the_least_recently_used_goes_first(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=3, max_num_seqs=1, state_interval=1024)
    texts = [prompt(seed, 30) for seed in range(3)]
    found = [num_cached(here, texts[number]) for number in (0, 1, 0, 2, 0, 1)]
    assert found == [0, 0, 28, 0, 28, 0]
    assert here.scheduler.states.num_evicted
    check_at_rest(here)


def test_without_a_prefix_cache_none_is_kept(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=4, prefix_caching=False)
    assert [num_cached(here, prompt(1, 30)) for _ in range(2)] == [0, 0]
    assert here.scheduler.states.num_free == 4


def test_nobody_starts_without_a_slot(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=2, max_num_seqs=8)
    for seed in range(6):
        here.submit(prompt(seed, 20), 6)
    here.step()
    assert here.scheduler.num_running == 2
    here.run()
    check_at_rest(here)


def test_those_who_run_lie_side_by_side(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=12, state_interval=1024)
    requests = []
    for seed in range(4):
        requests.append(here.submit(prompt(seed, 20), 9))
        here.step()
    assert here.scheduler.states.num_checkpoints
    assert [request.state_slot for request in requests] == [0, 1, 2, 3]
    here.run()
    check_at_rest(here)


def test_a_fork_goes_on_from_a_copy(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=6)
    parent = here.submit(prompt(1, 21), 12)
    here.step()
    here.step()
    child = here.fork(parent)
    assert child.state is not RequestState.RUNNING or child.state_slot != parent.state_slot
    here.run()
    assert child.output_token_ids == parent.output_token_ids
    check_at_rest(here)


def test_a_reset_cache_keeps_no_state(drive: Callable[..., Drive]) -> None:
    here = drive(num_states=6)
    num_cached(here, prompt(1, 40))
    here.scheduler.reset_prefix_cache(here.now_ns)
    assert here.scheduler.states.num_free == 6
    assert num_cached(here, prompt(1, 40)) == 0


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_each_goes_on_from_its_own_state(
    drive: Callable[..., Drive], expected_completion: Callable[[Sequence[int], int], list[int]], seed: int
) -> None:
    chance = random.Random(seed)
    shape = {"num_states": chance.choice((3, 5, 9)), "num_blocks": chance.choice((20, 40)), "max_num_seqs": 4}
    here = drive(**shape, state_interval=chance.choice((4, 16, 64)), preemption="recompute")
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
        victim = chance.choice(requests) if requests and chance.random() < 0.05 else None
        here.step(abort=victim)
    here.run()
    for request in requests:
        if request.finish_reason == "length":
            assert request.output_token_ids == expected_completion(request.prompt_token_ids, request.max_tokens)
    states = here.scheduler.states
    assert states.num_kept > 0
    assert states.num_restored > 0 or shape["num_states"] < 5, "others need the slots"
    check_at_rest(here)
