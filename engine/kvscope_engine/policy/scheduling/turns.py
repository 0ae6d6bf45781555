"""Turns between clients, and between the batches of one client: which running requests make way for one that waits.

A client that runs nothing gets a place from clients that run several requests, a batch that runs nothing from batches
of the same client that do. Whoever gives way goes on running something, so the number of clients, or of a client's
batches, that run grows each time; nobody makes way for a lower priority. Reads the queues and changes nothing.
"""

from __future__ import annotations

from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.ranked_queue import RankedQueue
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.admission import Admission
from kvscope_engine.policy.scheduling.preemption import victim_order
from kvscope_engine.policy.waiting_queue import WaitingQueue


class Turns:
    """Of the requests of one scheduler."""

    def __init__(self, waiting: WaitingQueue, running: RankedQueue, pool: BlockPool, admission: Admission) -> None:
        self._waiting = waiting
        self._running = running
        self._pool = pool
        self._admission = admission

    def victims_for_first(self, max_requests: int) -> list[Request]:
        """Running requests that are to give up their blocks for the first that waits, where `max_requests` may run.

        Empty when it fits anyway, when its client or batch runs already, or when it still would not fit.
        """
        first = self._waiting.first
        candidates = self._candidates(first)
        if not candidates:
            return []
        seats = len(self._running) + 1 - max_requests
        missing = self._admission.num_missing(first, self._admission.find(first))
        victims: list[Request] = []
        while (seats > 0 or missing > 0) and len(victims) < len(candidates):
            victim = candidates[len(victims)]
            victims.append(victim)
            seats -= 1
            missing -= sum(self._pool.ref_count(block) == 1 for block in victim.held_blocks)
        return [] if seats > 0 or missing > 0 else victims

    def _candidates(self, first: Request) -> list[Request]:
        """Running requests that a turn may be taken from, in their order: each leaves its client, or batch, another."""
        queue = self._waiting
        mine = queue.held_by_client(first)
        is_batch = bool(mine.num_requests)
        if not (mine.num_spare if is_batch else queue.num_spare):
            return []
        if is_batch and queue.held_by_batch(first).num_requests:
            return []
        held = queue.held_by_batch if is_batch else queue.held_by_client
        candidates = [
            request
            for request in self._running
            if request.priority <= first.priority
            and (request.client == first.client) is is_batch
            and held(request).num_requests > 1
        ]
        candidates.sort(key=lambda request: victim_order(request, held(request).num_tokens))
        left: dict[int, int] = {}
        may: list[Request] = []
        for request in candidates:
            holder = held(request)
            num_left = left.setdefault(id(holder), holder.num_requests)
            if num_left > 1:
                left[id(holder)] = num_left - 1
                may.append(request)
        return may
