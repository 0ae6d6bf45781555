"""The scheduling order."""

from __future__ import annotations

import random

from kvscope_engine.policy.ranked_queue import RankedQueue
from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.sampling_params import ResolvedSampling


def make_request(number: int, arrival_ns: int = 0, priority: int = 0) -> Request:
    return Request(number, f"r{number}", [1], ResolvedSampling(), 1, arrival_ns, priority=priority)


def test_queue_is_ordered_by_priority_then_arrival_then_number() -> None:
    requests = [
        make_request(1, arrival_ns=9, priority=5),
        make_request(2, arrival_ns=1),
        make_request(3, arrival_ns=2),
        make_request(4, arrival_ns=2),
        make_request(5, arrival_ns=0, priority=-1),
    ]
    queue = RankedQueue()
    for request in random.Random(1).sample(requests, len(requests)):
        queue.add(request)
    assert [request.number for request in queue] == [1, 2, 3, 4, 5]
    assert queue.first is requests[0]
    assert queue.pop_first() is requests[0]


def test_any_request_can_be_removed_from_the_scheduling_queue() -> None:
    rng = random.Random(2)
    requests = [make_request(number, rng.randrange(5), rng.randrange(3)) for number in range(50)]
    queue = RankedQueue()
    for request in requests:
        queue.add(request)
    for request in rng.sample(requests, 50):
        queue.remove(request)
        assert request not in list(queue)
    assert len(queue) == 0
