"""Requests that wait, in any order of coming and going."""

from __future__ import annotations

import random

import pytest

from kvscope_engine.policy.ranked_queue import rank
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.waiting_queue import WaitingQueue
from kvscope_telemetry.messages.sampling_params import SamplingParams


def make_request(number: int, arrival_ns: int = 0, priority: int = 0) -> Request:
    return Request(number, f"r{number}", [1], SamplingParams(), 1, arrival_ns, priority=priority)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_always_the_first_by_rank_who_is_next(seed: int) -> None:
    randomness = random.Random(seed)
    outside = [make_request(n, randomness.randrange(50), randomness.randrange(3)) for n in range(200)]
    queue, inside = WaitingQueue(), list[Request]()
    for _ in range(5_000):
        action = randomness.random()
        if outside and (action < 0.5 or not inside):
            request = outside.pop(randomness.randrange(len(outside)))
            queue.add(request)
            inside.append(request)
        elif action < 0.8:
            request = inside.pop(randomness.randrange(len(inside)))
            queue.remove(request)
            outside.append(request)
        else:
            assert queue.first is min(inside, key=rank)
            request = queue.pop_first()
            inside.remove(request)
            outside.append(request)
        assert len(queue) == len(inside)
    while inside:
        request = queue.pop_first()
        assert request is min(inside, key=rank)
        inside.remove(request)
    assert not queue


def test_who_comes_and_leaves_again_and_again_takes_no_more_room() -> None:
    queue = WaitingQueue()
    queue.add(make_request(0))
    for number in range(1, 10_000):
        request = make_request(number, arrival_ns=number)
        queue.add(request)
        queue.remove(request)
    assert len(queue._heap) < 50
