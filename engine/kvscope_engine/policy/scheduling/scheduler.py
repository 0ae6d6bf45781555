"""Continuous-batching scheduler: decides which requests run in a step, and with how many tokens.

Owns the waiting queue, the running requests, and each request's state, block tables and `num_computed_tokens`.
Imports no torch and reads no clock: callers pass the time in.

`schedule()` applies these rules in order:

1. Requests are ordered by rank: higher priority first, then earlier arrival. All rules below use this order, except
   that of the waiting requests, which `waiting_queue` defines.
2. Running requests continue: those with one uncomputed token (decodes) first, then prefills, in chunks that fit into
   the remaining `max_num_batched_tokens`. Blocks are allocated as tokens are scheduled.
3. If a running request needs blocks and too few are available, running requests are preempted in `victim_order` (lowest
   priority; then the client that holds the most tokens; then fewest preemptions; then newest) until there are enough;
   the request itself may be among them. A victim loses all its blocks and returns to the queue, where its rank puts it
   before all requests of its batch and client that were never admitted. It keeps its tokens; its KV is swapped out or
   recomputed, except for blocks that are still in the prefix cache (`preemption`).
4. If nothing was preempted, waiting requests are admitted in queue order, as long as the token budget is not used up,
   the blocks for all their known tokens are available, less a watermark of 1 % of the pool (at least one block; none if
   nothing runs or the policy reserves), and their LoRA adapter, if they have one, runs already or is one of at most
   `max_adapters`. A request that does not fit is not overtaken. A waiting request preempts running ones in one case
   only, whatever its priority: if its client runs nothing, it may preempt requests of clients that run several; if its
   batch runs nothing, requests of the same client's batches that run several (`fair_preemption`). Policies that reserve
   blocks have no such preemption.
5. Speculative tokens are scheduled last, within the budget, the available blocks and `max_num_seqs` (as the maximum
   number of sampled tokens per step). They never cause a preemption; the blocks of rejected ones are freed when the
   step is committed.
6. Further completions of a prompt wait until the prompt is computed, and then share its blocks (`fork`).

Preemption terminates. Rule 3: `add_request` refused what could not run alone, and each preemption is preceded by tokens
generated since the victim's admission. Rule 4: a client or batch never loses its only running request, so the number of
running clients, or of a client's running batches, increases each time; no victim has a higher priority.

While a step runs, the next one may be scheduled (async scheduling, `schedule_ahead`). The plan then assumes that the
running step completes; nothing is preempted, and no request is scheduled past its known end. If that is not possible,
`overlap_blocker` returns the reason, and the step is scheduled after the running one is committed. Blocks are freed
immediately when a request ends, although a step in flight may still read and write them. This is safe: that step
precedes everything that is launched for the next owner of the blocks, and the prefix cache cannot return them, since
only a commit inserts blocks into it.

Between two steps, a user may preempt a running request (`preempt`), evict and pin cached blocks (`evict`, `pin`) and
change the limits (`limits.set`). Rule 3 holds with pinned blocks: `add_request` and `pin` refuse what could not run
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvscope_engine.policy.allocation.allocation_policy import AllocationPolicy
from kvscope_engine.policy.block_needs import BlockNeeds
from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.kv_offload.lower_tiers import LowerTiers
from kvscope_engine.policy.kv_offload.mover_protocol import TierMover
from kvscope_engine.policy.kv_offload.swap_costs import PrefillRate
from kvscope_engine.policy.prefixes.prefix_index import Prefix
from kvscope_engine.policy.ranked_queue import RankedQueue
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduler_totals import SchedulerTotals
from kvscope_engine.policy.scheduling import planned_progress, request_events
from kvscope_engine.policy.scheduling.admission import Admission
from kvscope_engine.policy.scheduling.batch_limits import BatchLimits
from kvscope_engine.policy.scheduling.block_tables import BlockTables
from kvscope_engine.policy.scheduling.change_log import ChangeLog
from kvscope_engine.policy.scheduling.drafting import Drafting
from kvscope_engine.policy.scheduling.fair_preemption import FairPreemption
from kvscope_engine.policy.scheduling.pinning import check_fits_with_pins, check_pins
from kvscope_engine.policy.scheduling.plan_builder import PlanBuilder
from kvscope_engine.policy.scheduling.plan_commit import commit_plan
from kvscope_engine.policy.scheduling.planned_progress import PlannedProgress
from kvscope_engine.policy.scheduling.preemption import Preemption, PreemptionRecord, victim_choice, victim_order
from kvscope_engine.policy.scheduling.waiting_forks import WaitingForks
from kvscope_engine.policy.spec_decode.drafter import Drafter
from kvscope_engine.policy.state_pool import StatePool
from kvscope_engine.policy.step_plan import StepPlan
from kvscope_engine.policy.waiting_queue import WaitingQueue
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import FinishReason
from kvscope_telemetry.messages.request_state import RequestState, WaitsFor
from kvscope_telemetry.messages.telemetry import EventData
from kvscope_telemetry.running_time import RunningTime

MAX_RESTARTS_WITHOUT_PROGRESS: Final = 8
"""Maximum number of times that a request is restarted after a failed step, counted since its last generated token.

Each failure halves the step, so that after 8 failures a request out of 256 runs alone.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_adapters: int = 0
    """Maximum number of LoRA adapters per step."""
    preemption: str = "auto"
    """Preemption mode: `recompute`, `swap` or `auto` (`Preemption`)."""


class Scheduler:
    """Continuous batching over a block pool.

    Args:
        pool: Blocks of all tiers. With a `mover`, its slots in lower tiers are used.
        allocation: Chooses the blocks of a request.
        config: Limits and preemption mode.
        mover: Copies blocks between the tiers; None without lower tiers.
        drafter: Drafts tokens for speculative decoding; None to disable it.
        states: Slots for the states of recurrent layers; None if the model has no such layers.
    """

    def __init__(
        self,
        pool: BlockPool,
        allocation: AllocationPolicy,
        config: SchedulerConfig,
        *,
        mover: TierMover | None = None,
        drafter: Drafter | None = None,
        states: StatePool | None = None,
    ) -> None:
        self._pool = pool
        self.limits = BatchLimits(config.max_num_seqs, config.max_num_batched_tokens)
        self._max_model_len = config.max_model_len
        self._max_adapters = config.max_adapters
        self._allocation = allocation
        self._reserves = allocation.reserves
        self._waiting = WaitingQueue()
        self._running = RankedQueue()
        self._requests: dict[int, Request] = {}
        self.changes = ChangeLog(pool.moves)
        """Log of changed requests and block tables, with events. Drain it after each step."""
        self._waiting_forks = WaitingForks()
        self.totals = SchedulerTotals()
        self.running_time = RunningTime()
        """Converts spans of engine time to running time, without pauses and suspensions.

        The code that drives the scheduler reports pauses and suspensions to it.
        """
        self.prefill_rate = PrefillRate()
        self.tiers = None if mover is None else LowerTiers(pool, mover, self.totals, self._log_saved_rows)
        self.tables = BlockTables(pool, allocation, self.changes, self.tiers)
        self._preemption = Preemption(
            self.tables, self.tiers, self.prefill_rate, pool.block_size, config.preemption, states
        )
        self.states = states
        self._needs = BlockNeeds(pool.groups, pool.block_size, config.max_num_batched_tokens)
        self._admission = Admission(
            pool, self.tables, self.tiers, self.prefill_rate, self.totals, self.running_time, self._needs, states
        )
        self._fair_preemption = FairPreemption(self._waiting, self._running, pool, self._admission)
        self._disk_failure = ""
        self.drafting = None if drafter is None or self._reserves else Drafting(drafter, self.tables)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> list[Request]:
        """Running requests in the order of their rank."""
        return list(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of queued requests: new requests, preempted requests, and forks that wait for their parent's
        prompt.
        """
        return len(self._waiting) + len(self._waiting_forks)

    @property
    def requests(self) -> Mapping[int, Request]:
        """All unfinished requests by number, in order of arrival."""
        return self._requests

    @property
    def max_request_tokens(self) -> int:
        """Maximum number of tokens, prompt and output, of an accepted request.

        A request whose text starts with pinned blocks may be longer.
        """
        if self._reserves:  # then nothing can be pinned
            return min(self._max_model_len, self._allocation.max_request_tokens)
        return self._needs.max_tokens(self._pool.num_usable - len(self._pool.pinned), self._max_model_len)

    def prefix_of(self, row: int) -> Prefix | None:
        """Return the prefix stored in a ledger row of any tier, or None.

        For a retained recurrent state, this is the prefix of the block before it, in the first KV group.
        """
        if row < self._pool.num_blocks:
            return self._pool.prefix(row)
        if row >= self._pool.first_state:
            return None if self.states is None else self.states.prefix(row)
        return None if self.tiers is None else self.tiers.prefix(row)

    def num_reusable_tokens(self, request: Request) -> int:
        """Return the number of cached tokens with which `request` would start now. Changes nothing."""
        return self._admission.find_reusable(request).num_tokens

    def check_fits(self, request: Request) -> None:
        """Raise BadInput, with the numbers, if the request could not run even alone. Changes nothing."""
        self._needs.check_fits(request, self._pool.num_usable, self._max_model_len)
        self._allocation.check_fits(request)
        check_fits_with_pins(self._pool, self._needs, request)

    def add_request(self, request: Request) -> None:
        """Enqueue a new request. Raises BadInput, and records the refusal, if the request could not run even alone."""
        assert request.number not in self._requests, f"request {request.number} was added twice"
        try:
            self.check_fits(request)
        except BadInput as error:
            self.record_refusal(str(error), request.arrival_ns, number=request.number)
            raise
        self._requests[request.number] = request
        self.tables.init_tables(request)
        if self._waits_for_parent(request):
            request.waits_for = WaitsFor.PROMPT
            self._waiting_forks.add_request(request)
        else:
            self._waiting.add_request(request)
        self.changes.add_request(request)

    def record_aborted(self, request: Request, now_ns: int) -> None:
        """Record a request that was aborted before it could be queued."""
        request.state, request.finish_reason = RequestState.FINISHED, "abort"
        self.totals.aborted += 1
        self.changes.add_request(request)
        self.changes.record_event(
            request_events.aborted(request, now_ns, 0, "requested by the client before its prompt was read")
        )

    def record_refusal(self, cause: str, now_ns: int, *, number: int = 0) -> None:
        """Count a refused request and record the event. `add_request` calls it for the requests that it refuses."""
        self.totals.refused += 1
        self.changes.record_event(request_events.refused(number, now_ns, cause))

    def schedule(self, step: int, now_ns: int) -> StepPlan:
        """Plan a step. When this returns, the block tables have blocks for every scheduled token.

        Until the plan is committed, only `schedule_ahead` may be called. The plan is empty if there is no unfinished
        request, or if all of them wait for their structured-output grammar.
        """
        self._pool.step = step
        return self._schedule(PlannedProgress(), now_ns)

    def overlap_blocker(self, running: StepPlan) -> str:
        """Return why the next step cannot be scheduled while `running`, the last plan, is in flight; empty if
        it can.
        """
        if self._reserves:
            return planned_progress.RESERVING_ALLOCATOR
        if self.states is not None:
            return planned_progress.RECURRENT_STATES
        if self.tables.has_shared_last_blocks or (
            self._waiting_forks and any(map(self._waiting_forks.are_released_by, running.scheduled))
        ):
            return planned_progress.SHARED_PROMPT
        if self.drafting is not None and self.drafting.needs_tokens_of(running):
            return planned_progress.PENDING_DRAFTS
        may_admit = self._waiting and len(self._running) < self.limits.max_step_requests
        if may_admit and self._pool.index is not None and planned_progress.computes_prompts(running):
            return planned_progress.PROMPT_IN_PROGRESS
        if self._fairness_victims():
            return planned_progress.FAIRNESS
        return "" if self._fits_without_preemption(PlannedProgress(running)) else planned_progress.TOO_FEW_BLOCKS

    def schedule_ahead(self, running: StepPlan, now_ns: int) -> StepPlan:
        """Plan the next step, like `schedule`, while `running` is in flight. `overlap_blocker(running)` must be empty.

        The new plan must be launched and committed after `running`. Its allocations are recorded with the number of the
        running step, with which they are published. An empty plan means that no step can be planned before `running` is
        committed.
        """
        return self._schedule(PlannedProgress(running), now_ns)

    def _schedule(self, progress: PlannedProgress, now_ns: int) -> StepPlan:
        builder = PlanBuilder(self.limits.max_step_tokens, now_ns)
        if self.states is not None:
            self.states.drop_uncommitted()
        evicted_before, offloaded_before = self._pool.evicted_blocks, self.totals.offloaded_blocks
        states_before = self.states.num_offloaded if self.states is not None else 0
        self._schedule_prefills(self._schedule_decodes(builder, progress), builder, progress)
        if not builder.has_preempted:
            self._admit(builder, self._fairness_victims() if builder.budget and not progress else [])
        assert not (progress and builder.has_preempted), "a request in flight was preempted"
        if self.drafting is not None and not progress and not builder.has_preempted:
            self.drafting.add_drafts(builder, self._pool.step, self.limits.max_step_requests)
        if builder.evicted_for:
            count = self._pool.evicted_blocks - evicted_before
            num_offloaded = self.totals.offloaded_blocks - offloaded_before
            self.changes.record_event(request_events.evicted(count, num_offloaded, builder.evicted_for, now_ns))
        self.totals.copied_blocks += builder.num_copied
        if self.tiers is not None:
            self._flush(self.tiers, now_ns)
        plan = builder.plan()
        if self.states is not None and plan.scheduled:
            copies, saves = self.states.plan(plan.scheduled)
            plan = replace(plan, state_copies=copies, state_saves=saves)
            if evicted := self.states.drain_evicted():
                num_offloaded = self.states.num_offloaded - states_before
                self.changes.record_event(request_events.states_evicted(evicted, num_offloaded, now_ns))
        return plan

    def commit(self, plan: StepPlan, step: int, now_ns: int) -> None:
        """Record that the plan ran, so its tokens are now in their blocks. Requests that ended in the meantime
        are skipped.
        """
        self._pool.step = step
        self.totals.recomputed_tokens += commit_plan(plan, self._pool, step)
        self.tables.commit(step)
        if self.states is not None:
            self.states.commit(plan.scheduled, plan.state_saves)
        if self.drafting is not None:
            self.drafting.commit(plan, step, self.totals)
        if self._waiting_forks:
            for item in plan.scheduled:
                if item.request.num_computed_tokens >= item.request.num_prompt_tokens:
                    self._fork_waiting_children(item.request, now_ns)
        if self.tables.has_windows:
            for item in plan.scheduled:
                if item.request.state is RequestState.RUNNING:
                    self.tables.free_unread(item.request, step)

    def finish(self, request: Request, reason: FinishReason, now_ns: int) -> None:
        """End a request that is complete or failed, and free its blocks. Does nothing if it has ended already."""
        if request.is_finished:
            return
        num_blocks = self._remove(request, reason)
        self.totals.finished += 1
        self.changes.record_event(request_events.finished(request, now_ns, num_blocks))

    def abort(self, request: Request, now_ns: int, cause: str = "requested by the client") -> None:
        """End a request in any state, also between schedule and commit. Does nothing if it has ended already."""
        if request.is_finished:
            return
        num_blocks = self._remove(request, "abort")
        self.totals.aborted += 1
        self.changes.record_event(request_events.aborted(request, now_ns, num_blocks, cause))

    def fork(self, parent: Request, child: Request, now_ns: int) -> None:
        """Run `child`, a new request, on the parent's blocks.

        Its tokens must start with the parent's computed tokens, with at least one token left to compute. Full blocks
        remain shared; a partial last block is copied (`StepPlan.copies`) once either request writes to it. If the
        parent does not run, the limit of running requests is reached, or the policy reserves blocks (and shares none),
        the child waits in the queue. Raises BadInput if the child could not run even alone.
        """
        self.add_request(child)
        self._fork(parent, child, now_ns)

    def reset_prefix_cache(self, now_ns: int) -> int:
        """Clear the prefix cache of all tiers. Returns the number of cached blocks of the pool that became free."""
        count = self._pool.reset_prefix_cache()
        if self.tiers is not None:
            self.tiers.reset()
        if self.states is not None:
            self.states.reset()
        self.changes.record_event(request_events.cache_reset(count, now_ns))
        return count

    def preempt(self, request: Request, how: str, by: str, now_ns: int) -> PreemptionRecord | None:
        """Preempt a running request on behalf of user `by`. Must not be called during a step.

        `how` is "recompute", "swap", or "" for the configured mode. Returns None, and does nothing, if a swap was
        requested and no lower tier has space.
        """
        builder = PlanBuilder(0, now_ns)
        record = self._preemption.free_blocks_by_request(request, self._pool.step, builder, how)
        if record is not None:
            self.changes.record_event(request_events.preempted_by(request, by, record, now_ns))
            self._requeue(request, now_ns)
            if self.tiers is not None:
                self._flush(self.tiers, now_ns)
        return record

    def restart(self, request: Request, why: str, now_ns: int) -> bool:
        """Return a running request to the queue for recomputation, because a step failed and may have corrupted its
        recurrent state.

        Returns False, and does nothing, if it has no recurrent state, or was restarted `MAX_RESTARTS_WITHOUT_PROGRESS`
        times since its last token. Like `abort`, it may be called between schedule and commit.
        """
        if request.state_slot < 0:
            return False
        if request.num_tokens != request.restarted_at:
            request.restarted_at, request.num_restarts = request.num_tokens, 0
        if request.num_restarts == MAX_RESTARTS_WITHOUT_PROGRESS:
            return False
        request.num_restarts += 1
        record = self._preemption.free_blocks_by_request(request, self._pool.step, PlanBuilder(0, now_ns), "recompute")
        assert record is not None, "there is always room to compute"
        self.changes.record_event(request_events.restarted(request, why, record, now_ns))
        self._requeue(request, now_ns)
        return True

    def evict(self, blocks: list[int], by: str, now_ns: int) -> int:
        """Evict cached blocks on behalf of user `by`. Returns the number offloaded to host memory.

        `blocks` must be evictable and distinct.
        """
        offloaded_before = self.totals.offloaded_blocks
        self._pool.evict(blocks)
        num_offloaded = self.totals.offloaded_blocks - offloaded_before
        self.changes.record_event(request_events.evicted_by(len(blocks), num_offloaded, by, now_ns))
        if self.tiers is not None:
            self._flush(self.tiers, now_ns)
        return num_offloaded

    def pin(self, blocks: list[int]) -> None:
        """Protect cached blocks from eviction.

        Raises BadInput, and pins none, if an unfinished request could no longer run alone.
        """
        check_pins(self._pool, self._needs, self._requests.values(), blocks)
        self._pool.pin(blocks)

    def save_prefixes_to_disk(self, may_continue: Callable[[], bool]) -> None:
        """Write cached prefixes to disk at shutdown, until `may_continue()` returns False.

        Nothing may be scheduled afterwards.
        """
        if self.tiers is not None:
            self.tiers.save_prefixes_to_disk(may_continue)

    def check_integrity(self) -> None:
        self._pool.check_integrity(self._allocation.holders(self._requests.values()))
        if self.tiers is not None:
            self.tiers.check_integrity(self._requests.values())
        if self.states is not None:
            self.states.check_integrity(self._requests.values())

    def _schedule_decodes(self, builder: PlanBuilder, progress: PlannedProgress) -> list[Request]:
        """Schedule running requests with exactly one uncomputed token, within the budget. Returns the requests
        with more.
        """
        prefills, is_ahead = [], bool(progress)
        for request in list(self._running):  # copy: scheduling a request may preempt later ones
            if request.state is not RequestState.RUNNING or (is_ahead and progress.ends(request)):
                continue
            start, known = progress.span(request)
            if start + 1 < known:
                prefills.append(request)
            elif (
                builder.budget
                and not request.awaits_grammar_mask
                and self._allocate_or_preempt(request, start + 1, builder)
            ):
                builder.add(request, start, 1, True)
        return prefills

    def _schedule_prefills(self, prefills: list[Request], builder: PlanBuilder, progress: PlannedProgress) -> None:
        for request in prefills:
            if builder.budget and request.state is RequestState.RUNNING:
                self._schedule_chunk(request, progress.span(request)[0], builder)

    def _schedule_chunk(self, request: Request, start: int, builder: PlanBuilder) -> None:
        """Schedule as many of the request's known tokens as the budget allows.

        The last known token, after which a token is sampled, is held back until the token mask of structured output is
        ready.
        """
        known = request.num_tokens
        count = min(known - start, builder.budget)
        if start + count == known and request.awaits_grammar_mask:
            count -= 1
        if count and self._allocate_or_preempt(request, start + count, builder):
            builder.add(request, start, count, start + count == known)

    def _fits_without_preemption(self, progress: PlannedProgress) -> bool:
        """Whether all running requests can compute their known tokens with the blocks available."""
        needed = available = 0
        for request in self._running:
            if not progress.ends(request):
                needed += self.tables.num_needed(request, progress.span(request)[1])
                available = self.tables.num_available(request)
        return needed <= available

    def _fairness_victims(self) -> list[Request]:
        if not self._waiting or self._reserves or not self._running or not self._adapter_fits(self._waiting.first):
            return []
        return self._fair_preemption.victims_for_first(self.limits.max_step_requests)

    def _admit(self, builder: PlanBuilder, victims: list[Request]) -> None:
        """Admit waiting requests in order while they fit.

        If there are `victims`, preempt them and admit only one request. Sets `waits_for` of the first request that does
        not fit.
        """
        if victims:
            self._preempt_for_fairness(self._waiting.first, victims, builder)
        while self._waiting:
            request = self._waiting.first
            if len(self._running) >= self.limits.max_step_requests:
                self._set_waits_for(request, WaitsFor.SEQUENCE_LIMIT)
                return
            if not builder.budget:
                self._set_waits_for(request, WaitsFor.BUDGET)
                return
            found = self._admission.find_reusable(request)
            if not self._admission.fits(request, found, is_alone=not self._running):
                self._set_waits_for(request, WaitsFor.BLOCKS)
                return
            if not self._adapter_fits(request):
                self._set_waits_for(request, WaitsFor.ADAPTER)
                return
            if request.awaits_grammar_mask and found.num_tokens + 1 >= request.num_tokens:
                self._set_waits_for(request, WaitsFor.GRAMMAR)  # nothing could be computed for it
                return
            self._waiting.remove(request)
            event = self._admission.start(request, found, builder)
            self._start(request, builder.now_ns)
            self.changes.record_event(event)
            self._schedule_chunk(request, request.num_computed_tokens, builder)
            if victims:
                return

    def _adapter_fits(self, request: Request) -> bool:
        if request.adapter is None:
            return True
        running = {other.adapter for other in self._running if other.adapter is not None}
        return request.adapter in running or len(running) < self._max_adapters

    def _set_waits_for(self, request: Request, waits_for: WaitsFor) -> None:
        if request.waits_for is not waits_for:
            request.waits_for = waits_for
            self.changes.touch(request)

    def _preempt_for_fairness(self, first: Request, victims: list[Request], builder: PlanBuilder) -> None:
        builder.has_preempted = True
        for victim in victims:
            record = self._preemption.free_blocks(victim, self._pool.step, builder)
            self.changes.record_event(request_events.preempted_for_fairness(victim, first, record, builder.now_ns))
            self._requeue(victim, builder.now_ns)

    def _start(self, request: Request, now_ns: int) -> None:
        if request.admitted_ns is None:
            request.admitted_ns = now_ns
            self.totals.admitted += 1
        request.state, request.waits_for = RequestState.RUNNING, WaitsFor.UNKNOWN
        self._running.add(request)
        self._waiting.record_start(request)
        self.changes.touch(request)
        self._log_state_row(request)

    def _allocate_or_preempt(self, request: Request, stop: int, builder: PlanBuilder) -> bool:
        """Allocate blocks for the request up to position `stop`, preempting running requests if too few are available.

        Returns False if the request was preempted itself.
        """
        while needed := self.tables.num_needed(request, stop):
            available = self.tables.num_available(request)
            if needed <= available:
                self.tables.grow(request, needed, self._pool.step, builder)
                return True
            victim = min(self._running, key=self._victim_order)
            self._preempt(victim, request, needed, available, builder)
            if victim is request:
                return False
        return True

    def _victim_order(self, request: Request) -> tuple[int, ...]:
        return victim_order(request, self._waiting.client_usage(request).num_tokens)

    def _preempt(self, victim: Request, needy: Request, needed: int, available: int, builder: PlanBuilder) -> None:
        builder.has_preempted = True
        choice, choice_number = victim_choice(victim, needy, self._victim_order)
        why = EventData(
            kind="preempted", num_needed=needed, num_available=available, choice=choice, choice_number=choice_number
        )
        record = self._preemption.free_blocks(victim, self._pool.step, builder)
        self.changes.record_event(request_events.preempted(victim, needy, why, record, builder.now_ns))
        self._requeue(victim, builder.now_ns)

    def _requeue(self, victim: Request, now_ns: int) -> None:
        self._running.remove(victim)
        self._waiting.record_stop(victim)
        self._log_state_row(victim)
        victim.num_preemptions += 1
        victim.preempted_ns = now_ns
        victim.state = RequestState.PREEMPTED
        self.changes.touch(victim)
        self._waiting.add_request(victim)
        self.totals.preemptions += 1

    def _log_state_row(self, request: Request) -> None:
        """Record in the change log that the request's recurrent state has another slot, or none any more."""
        if self.states is not None:
            self.changes.record_table(request, 0, self.states.group)

    def _waits_for_parent(self, child: Request) -> bool:
        parent = self._requests.get(child.parent)
        return parent is not None and parent.num_computed_tokens < parent.num_prompt_tokens and not self._reserves

    def _fork_waiting_children(self, parent: Request, now_ns: int) -> None:
        """Enqueue all requests that waited for the parent's prompt, which is now computed, and try to fork them."""
        for child in self._waiting_forks.pop_children(parent):
            self._set_waits_for(child, WaitsFor.UNKNOWN)
            self._waiting.add_request(child)
            self._fork(parent, child, now_ns)

    def _fork(self, parent: Request, child: Request, now_ns: int) -> None:
        if (
            parent.state is not RequestState.RUNNING
            or len(self._running) >= self.limits.max_step_requests
            or self._reserves
        ):
            return
        if self.states is not None and not (self.states.num_available and self._can_share_state(parent, child)):
            return
        self._waiting.remove(child)
        child.num_computed_tokens = child.num_cached_tokens = min(parent.num_computed_tokens, child.num_tokens - 1)
        self.totals.count_admission(child.num_prompt_tokens, child.num_cached_tokens)
        self.tables.share(parent, child)
        if self.states is not None:
            self.states.fork(parent, child)
        self._start(child, now_ns)
        self.changes.record_event(request_events.forked(parent, child, now_ns, self.running_time))

    def _can_share_state(self, parent: Request, child: Request) -> bool:
        """Whether the child can continue from the parent's recurrent state, which includes all tokens that the
        parent computed.
        """
        return parent.num_computed_tokens <= child.num_tokens - 1

    def _flush(self, tiers: LowerTiers, now_ns: int) -> None:
        """Complete the copies that the plan needs. Records the failure of the disk tier once."""
        tiers.flush()
        if tiers.failure and tiers.failure != self._disk_failure:
            self._disk_failure = tiers.failure
            self.changes.record_event(request_events.disk_failed(tiers.failure, now_ns))

    def _log_saved_rows(self, request: Request) -> None:
        self.changes.record_table(request, 0)

    def _remove(self, request: Request, reason: FinishReason) -> int:
        """Remove a request from all queues and free its blocks. Returns the number of blocks that it held."""
        num_blocks = self.tables.num_held(request)
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
            self._waiting.record_stop(request)
        else:
            (self._waiting_forks if request in self._waiting_forks else self._waiting).remove(request)
        self.tables.release(request, self._pool.step)
        if self.states is not None:
            self.states.release(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        if self.drafting is not None:
            self.drafting.remove_request(request)
        del self._requests[request.number]
        self.changes.touch(request)
        for child in self._waiting_forks.pop_children(request):
            self._set_waits_for(child, WaitsFor.UNKNOWN)
            self._waiting.add_request(child)
        return num_blocks
