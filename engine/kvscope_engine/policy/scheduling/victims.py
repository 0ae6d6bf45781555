"""Who gives up its blocks when a running request needs one and there is none."""

from __future__ import annotations

from collections.abc import Iterable

from kvscope_engine.policy.ranked_queue import rank
from kvscope_engine.policy.request import Request


def choose_victim(running: Iterable[Request]) -> Request:
    """Of the running requests the one of the lowest priority; among those the least often preempted; then the newest.

    So nobody is preempted twice before another of its priority was once. It ends all the same: a request is admitted
    only when all it knows fits, so each preemption follows tokens that were generated since, and those are kept.
    """
    return min(running, key=_order)


def _order(request: Request) -> tuple[int, int, int, int]:
    _, arrival_ns, number = rank(request)
    return (request.priority, request.num_preemptions, -arrival_ns, -number)
