"""The waiting queue, with requests that come and go in any order."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import pytest

from kvscope_engine.policy.ranked_queue import rank
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.waiting_queue import WaitingQueue, batch_of
from kvscope_telemetry.messages.sampling_params import ResolvedSampling


def make_request(number: int, arrival_ns: int = 0, priority: int = 0) -> Request:
    return Request(number, f"r{number}", [1], ResolvedSampling(), 1, arrival_ns, priority=priority)


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.storm) for seed in (1, 2, 3, 4))]


@pytest.mark.parametrize("seed", SEEDS)
def test_first_request_of_the_waiting_queue_always_has_the_lowest_rank(seed: int) -> None:
    randomness = random.Random(seed)
    outside = [make_request(n, randomness.randrange(50), randomness.randrange(3)) for n in range(200)]
    queue, inside = WaitingQueue(), list[Request]()
    for _ in range(5_000):
        action = randomness.random()
        if outside and (action < 0.5 or not inside):
            request = outside.pop(randomness.randrange(len(outside)))
            queue.add_request(request)
            inside.append(request)
        elif action < 0.8:
            request = inside.pop(randomness.randrange(len(inside)))
            queue.remove(request)
            outside.append(request)
        else:
            request = queue.first
            assert request is min(inside, key=rank)
            queue.remove(request)
            inside.remove(request)
            outside.append(request)
        assert len(queue) == len(inside)
    while inside:
        request = queue.first
        assert request is min(inside, key=rank)
        queue.remove(request)
        inside.remove(request)
    assert not queue


class PlainQueue:
    """A plain model of the queue that searches everything each time."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.running: dict[int, tuple[Request, int]] = {}

    def held(self, client: str, batch: str | None = None) -> int:
        return sum(
            tokens
            for request, tokens in self.running.values()
            if request.client == client and batch in (None, request.batch)
        )

    @property
    def first(self) -> Request:
        highest = max(request.priority for request in self.waiting)
        top = [request for request in self.waiting if request.priority == highest]
        clients = {request.client for request in top}
        firsts = [self._of_client([request for request in top if request.client == client]) for client in clients]
        return min(firsts, key=lambda request: (self.held(request.client), rank(request)))

    def _of_client(self, requests: list[Request]) -> Request:
        return min(requests, key=lambda request: (self.held(request.client, request.batch), rank(request)))


@pytest.mark.parametrize("seed", SEEDS)
def test_clients_and_their_batches_are_served_fairly(seed: int) -> None:
    randomness = random.Random(seed)
    outside = [make_request(n, randomness.randrange(50), randomness.randrange(2)) for n in range(60)]
    for request in outside:
        request.client, request.batch = randomness.choice("abc"), randomness.choice("xyz")
        request.prompt_token_ids = [1] * randomness.randrange(1, 5)
    queue, model = WaitingQueue(), PlainQueue()
    for _ in range(3_000):
        action = randomness.random()
        if outside and action < 0.4:
            request = outside.pop(randomness.randrange(len(outside)))
            queue.add_request(request)
            model.waiting.append(request)
        elif model.waiting and action < 0.8:
            request = queue.first
            assert request is model.first
            queue.remove(request)
            queue.record_start(request)
            model.waiting.remove(request)
            model.running[request.number] = (request, request.num_tokens)
        elif model.running:
            request, _ = model.running.pop(randomness.choice(list(model.running)))
            queue.record_stop(request)
            outside.append(request)
        running = [request for request, _ in model.running.values()]
        several = [batch for batch, count in Counter(map(batch_of, running)).items() if count > 1]
        assert queue.num_preemptible_clients == sum(count > 1 for count in Counter(r.client for r in running).values())
        for request in running:
            assert queue.client_usage(request).num_preemptible_batches == sum(
                client == request.client for client, _ in several
            )
            assert queue.client_usage(request).num_tokens == model.held(request.client)
            assert queue.batch_usage(request).num_tokens == model.held(request.client, request.batch)


def test_single_request_does_not_wait_for_a_thousand_of_another_client() -> None:
    queue = WaitingQueue()
    for number in range(1000):
        request = make_request(number, arrival_ns=number)
        request.client, request.batch = "much", str(number % 2)
        queue.add_request(request)
    running = queue.first
    queue.remove(running)
    queue.record_start(running)
    alone, other = make_request(2000, arrival_ns=5000), make_request(2001, arrival_ns=6000)
    alone.client, alone.batch = "little", "one"
    other.client, other.batch = "much", "one more"
    queue.add_request(alone)
    queue.add_request(other)
    assert queue.first is alone
    queue.remove(alone)
    queue.record_start(alone)
    numbers = []
    for _ in range(3):
        request = queue.first
        queue.remove(request)
        queue.record_start(request)
        numbers.append(request.number)
    assert numbers == [1, 2001, 2]  # batches of the client that hold nothing come first


def test_requests_that_come_and_go_do_not_use_more_memory() -> None:
    queue = WaitingQueue()
    queue.add_request(make_request(0))
    tracemalloc.start()
    try:
        for number in range(1, 10_000):
            request = make_request(number, arrival_ns=number)
            queue.add_request(request)
            queue.remove(request)
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()
