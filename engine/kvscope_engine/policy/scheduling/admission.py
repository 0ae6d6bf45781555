"""Admission of a waiting request: whether it fits, and with which cached blocks it starts.

The scheduler owns the requests and queues, and decides which request is next.
"""

from __future__ import annotations

from kvscope_engine.policy.block_needs import BlockNeeds
from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.kv_offload.lower_tiers import LowerTiers
from kvscope_engine.policy.kv_offload.swap_costs import PrefillRate
from kvscope_engine.policy.prefixes.prefix_history import Miss
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduler_totals import SchedulerTotals
from kvscope_engine.policy.scheduling import request_events
from kvscope_engine.policy.scheduling.block_tables import BlockTables
from kvscope_engine.policy.scheduling.plan_builder import PlanBuilder
from kvscope_engine.policy.scheduling.request_events import Blocks
from kvscope_engine.policy.scheduling.request_prefixes import explain_miss
from kvscope_engine.policy.scheduling.reusable_blocks import Reusable, find_reusable
from kvscope_engine.policy.state_pool import StatePool
from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.running_time import RunningTime


class Admission:
    """Admits waiting requests to one pool.

    1 % of the blocks, and at least one, is reserved for the running requests (watermark), unless none runs or the
    allocation policy reserves blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        tables: BlockTables,
        tiers: LowerTiers | None,
        rate: PrefillRate,
        totals: SchedulerTotals,
        running_time: RunningTime,
        needs: BlockNeeds,
        states: StatePool | None = None,
    ) -> None:
        self._pool = pool
        self._tables = tables
        self._tiers = tiers
        self._rate = rate
        self._totals = totals
        self._watermark = 0 if tables.reserves else max(1, pool.num_blocks // 100)
        self._running_time = running_time
        self._needs = needs
        self._states = states

    def find_reusable(self, request: Request) -> Reusable:
        return find_reusable(self._pool, self._tiers, self._rate, request, self._states)

    def fits(self, request: Request, found: Reusable, *, is_alone: bool) -> bool:
        """Whether blocks for all known tokens of the request, and a slot for its recurrent state, are available."""
        if self._states is not None and not self._states.num_available:
            return False
        return self.num_missing(request, found) - (self._watermark if is_alone else 0) <= 0

    def num_missing(self, request: Request, found: Reusable) -> int:
        """Return the number of blocks that the request lacks in addition to the watermark; negative if blocks
        are left over.
        """
        available = self._tables.num_available(request) - self._pool.num_idle(found.hits)
        return self._num_blocks(request) - len(found.hits) + self._watermark - available

    def start(self, request: Request, found: Reusable, builder: PlanBuilder) -> Event:
        """Start the request with the cached blocks in `found`. Returns the event to publish."""
        pool = self._pool
        request.num_computed_tokens = self._tables.start(request, found, pool.step, builder)
        is_state_loaded = self._states is not None and self._start_state(self._states, request, found)
        reused = request.num_computed_tokens
        if request.admitted_ns is None:
            request.num_cached_tokens = reused
            self._totals.count_admission(request.num_prompt_tokens, reused)
        else:
            self._totals.restored_tokens += reused
        miss = explain_miss(pool, request, reused // pool.block_size)
        if found.num_stateless:
            miss = Miss("state", reused + found.num_stateless)
        blocks = Blocks(self._num_blocks(request), self._tables.num_reserved_blocks(request))
        event = request_events.admitted(request, builder.now_ns, found, reused, blocks, miss, self._running_time)
        return request_events.with_loaded_state(event) if is_state_loaded else event

    def _start_state(self, states: StatePool, request: Request, found: Reusable) -> bool:
        """Allocate a slot with the recurrent state after the request's cached tokens.

        Returns whether the state was loaded from host memory. If not all blocks could be loaded, the request resumes
        from the last retained state before the missing blocks.
        """
        size, is_whole = self._pool.block_size, request.num_computed_tokens == found.num_tokens
        request.diverged_at = found.num_tokens + found.num_stateless if found.num_stateless else 0
        if found.is_saved and is_whole:
            states.swap_in(request)
            return True
        digests = request.block_digests[: request.num_computed_tokens // size]
        num_blocks = len(digests) if is_whole else next(states.checkpoints(digests, include_host=True), 0)
        request.num_computed_tokens = num_blocks * size
        self._tables.trim(request, self._pool.step)
        states.release(request)
        return states.allocate(request, digests[num_blocks - 1] if num_blocks else None)

    def _num_blocks(self, request: Request) -> int:
        return self._needs.max_blocks(request.num_tokens)
