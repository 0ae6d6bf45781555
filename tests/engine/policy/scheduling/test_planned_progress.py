"""Async scheduling: planning a step while another runs, and what prevents it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

Make = Callable[..., Any]  # fixture of tests/engine/conftest.py


def tokens_by_request(plan: Any) -> dict[int, int]:
    """Return request number -> tokens of a plan."""
    return {item.request.number: item.num_tokens for item in plan.scheduled}


def test_decode_step_is_scheduled_ahead_before_the_previous_token_is_known(drive: Make) -> None:
    one = drive()
    request = one.submit([1] * 5, 4)
    one.step(ahead=True)
    assert (request.num_computed_tokens, request.num_tokens) == (5, 6)
    (item,) = one.flight[0].scheduled
    assert (item.start, item.num_tokens, item.samples) == (5, 1, True)
    assert one.scheduler.schedule_ahead(one.flight[0], 0).scheduled[0].start == 6


def test_prompt_chunks_are_scheduled_ahead_of_the_previous_step(drive: Make) -> None:
    one = drive(max_num_batched_tokens=4)
    one.submit([1] * 11, 2)
    starts = []
    while one.scheduler.requests:
        plan, _ = one.step(ahead=True)
        starts += [item.start for item in plan.scheduled]
    assert starts == [0, 4, 8, 11]
    assert one.num_ahead == 3


def test_no_step_is_scheduled_ahead_after_the_last_token_of_a_request(drive: Make) -> None:
    one = drive()
    one.submit([1] * 5, 1)
    one.step(ahead=True)
    assert one.num_ahead == 0
    assert not one.scheduler.requests


def test_new_request_is_admitted_ahead(drive: Make) -> None:
    one = drive()
    first = one.submit([1] * 5, 9)
    one.step(ahead=True)
    second = one.submit([2] * 6, 9)
    one.step(ahead=True)
    assert [item.request for item in one.flight[0].scheduled] == [first, second]


@pytest.mark.parametrize("allocator", ["contiguous", "buddy", "virtual"])
def test_reserving_policy_prevents_scheduling_ahead(drive: Make, allocator: str) -> None:
    one = drive(allocator=allocator, prefix_caching=False, max_model_len=64)
    one.submit([1] * 5, 4)
    plan, _ = one.step(ahead=True)
    assert one.scheduler.overlap_blocker(plan) == "an allocator that reserves"
    assert one.num_ahead == 0


def test_forked_completions_are_scheduled_ahead_once_they_share_no_block(drive: Make) -> None:
    one = drive()
    one.siblings([1] * 6, 9, 2)
    reasons = []
    for _ in range(5):
        plan, _ = one.step(ahead=True)
        reasons.append(one.scheduler.overlap_blocker(plan))
    assert reasons[0] == "completions that share their prompt"
    assert reasons[-1] == ""
    assert one.num_ahead > 0


@pytest.mark.parametrize("option", ["matcher", "presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_request_with_output_dependent_sampling_is_scheduled_ahead(drive: Make, option: str) -> None:
    """The runner samples its tokens after the previous step is committed."""
    one = drive()
    request = one.request([1] * 5, 9)
    if option == "matcher":
        request.matcher = SimpleNamespace(is_ready=True)
    else:
        request.sampling = type(request.sampling)(**{option: 0.5})
    one.scheduler.add_request(request)
    other = one.submit([2] * 5, 9)
    for count in range(1, 4):
        one.step(ahead=True)
        assert one.num_ahead == count
        assert [item.request for item in one.flight[0].scheduled] == [request, other]


def test_prompt_that_another_request_may_share_is_computed_first(drive: Make) -> None:
    """This finds as many prefix hits as synchronous scheduling."""
    one = drive(max_num_seqs=2, max_num_batched_tokens=12)
    one.submit([1] * 12, 3)
    later = one.submit([1] * 12, 3)
    plan, _ = one.step(ahead=True)
    assert one.scheduler.overlap_blocker(plan) == "a prompt in progress that others may share"
    while one.scheduler.requests:
        one.step(ahead=True)
    assert later.num_cached_tokens == 8
    assert one.num_ahead > 0


def test_prompt_does_not_delay_if_no_request_can_be_admitted(drive: Make) -> None:
    one = drive(max_num_seqs=1, max_num_batched_tokens=5)
    one.submit([1] * 12, 3)
    later = one.submit([1] * 12, 3)
    for _ in range(3):
        plan, _ = one.step(ahead=True)
        assert one.scheduler.overlap_blocker(plan) == ""
    while one.scheduler.requests:
        one.step(ahead=True)
    assert later.num_cached_tokens == 8


def test_chunked_prompt_waits_for_its_forks_only_at_its_end(drive: Make) -> None:
    one = drive(max_num_batched_tokens=5)
    one.siblings([1] * 12, 9, 2)
    reasons = []
    for _ in range(3):
        plan, _ = one.step(ahead=True)
        reasons.append(one.scheduler.overlap_blocker(plan))
    assert reasons == ["", "", "completions that share their prompt"]


def test_scheduling_ahead_never_preempts(drive: Make) -> None:
    one = drive(num_blocks=6, prefix_caching=False)
    one.submit([1] * 8, 9)
    one.submit([2] * 8, 9)
    plan, _ = one.step(ahead=True)
    while one.scheduler.overlap_blocker(plan) == "":
        plan, _ = one.step(ahead=True)
    assert one.scheduler.overlap_blocker(plan) == "no free block for each request"
    assert one.scheduler.totals.preemptions == 0
    one.run()
    assert one.scheduler.totals.preemptions > 0


def test_request_waiting_for_its_grammar_computes_its_prompt_and_samples_later(drive: Make) -> None:
    one = drive(max_num_batched_tokens=10)
    request = one.request(range(6), 2)
    form = request.matcher = SimpleNamespace(is_ready=False)
    one.scheduler.add_request(request)
    beside = one.submit([7], 3)
    assert tokens_by_request(one.step()[0]) == {1: 5, 2: 1}
    assert tokens_by_request(one.step()[0]) == {2: 1}, "others go on without it"
    form.is_ready = True
    assert tokens_by_request(one.step()[0]) == {1: 1, 2: 1}
    assert beside.is_finished
    form.is_ready = False
    assert tokens_by_request(one.step()[0]) == {}, "the request must wait without ending"
    form.is_ready = True
    one.run()
    assert request.finish_reason == "length"
