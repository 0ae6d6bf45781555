"""Fairness between clients, and between one client's batches: chooses running requests to preempt for a waiting one.

A client that runs nothing may preempt requests of clients that run several; a batch that runs nothing may preempt
requests of the same client's batches that run several. A client or batch never loses its only running request, so the
number of running clients, or of a client's running batches, increases each time. No victim has a higher priority than
the waiting request. Reads the queues and changes nothing.
"""

from __future__ import annotations

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.ranked_queue import RankedQueue
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.admission import Admission
from kvscope_engine.policy.scheduling.preemption import victim_order
from kvscope_engine.policy.waiting_queue import WaitingQueue


class FairPreemption:
    def __init__(self, waiting: WaitingQueue, running: RankedQueue, pool: BlockPool, admission: Admission) -> None:
        self._waiting = waiting
        self._running = running
        self._pool = pool
        self._admission = admission

    def victims_for_first(self, max_requests: int) -> list[Request]:
        """Return the running requests to preempt for the first waiting request, if at most `max_requests` may run.

        The list is empty if that request fits without preemption, if its client or batch runs already, or if it would
        not fit even after preemption.
        """
        first = self._waiting.first
        candidates = self._candidates(first)
        if not candidates:
            return []
        num_excess_requests = len(self._running) + 1 - max_requests
        num_missing_blocks = self._admission.num_missing(first, self._admission.find_reusable(first))
        victims: list[Request] = []
        while (num_excess_requests > 0 or num_missing_blocks > 0) and len(victims) < len(candidates):
            victim = candidates[len(victims)]
            victims.append(victim)
            num_excess_requests -= 1
            num_missing_blocks -= sum(self._pool.ref_count(block) == 1 for block in victim.held_blocks)
        return [] if num_excess_requests > 0 or num_missing_blocks > 0 else victims

    def _candidates(self, first: Request) -> list[Request]:
        """Return the running requests that may be preempted for `first`, in victim order."""
        queue = self._waiting
        usage = queue.client_usage(first)
        is_batch = bool(usage.num_requests)
        if not (usage.num_preemptible_batches if is_batch else queue.num_preemptible_clients):
            return []
        if is_batch and queue.batch_usage(first).num_requests:
            return []
        usage_of = queue.batch_usage if is_batch else queue.client_usage
        candidates = [
            request
            for request in self._running
            if request.priority <= first.priority
            and (request.client == first.client) is is_batch
            and usage_of(request).is_preemptible
        ]
        candidates.sort(key=lambda request: victim_order(request, usage_of(request).num_tokens))
        num_remaining: dict[int, int] = {}  # requests that the client or batch would have left, by the id of its usage
        victims: list[Request] = []
        for request in candidates:
            usage = usage_of(request)
            count = num_remaining.setdefault(id(usage), usage.num_requests)
            if count > 1:
                num_remaining[id(usage)] = count - 1
                victims.append(request)
        return victims
