"""The scheduler: who runs in a step, with how many tokens, and who waits.

Owns the queue, the running requests and, of each request, state, block table and `num_computed_tokens`.
Knows no tensors and no clock: times come with the calls.

The rules, in the order they are applied in each step:

1. Order of service is by rank: higher priority first, then earlier arrival. It decides everything below but who waits.
2. Running requests go on: those one token short (decode) first, then prefills, in chunks that fit what is
   left of `max_num_batched_tokens`. Blocks are taken as tokens come.
3. When a running request needs a block and there is none, one gives up all its blocks (`victim_order`: of the lowest
   priority one of the client that holds the most, of its the one least often preempted, of those the newest) and goes
   back to the queue, where its rank puts it before all of its batch and client that were never admitted. It keeps its
   tokens; what was computed of them moves to a lower tier, or is computed again, less what the prefix cache still holds
   (`preemption`). It ends all the same: `add_request` refused what could not run alone, and each preemption
   follows tokens generated since the victim came.
4. Waiting requests are admitted in the order of the queue (priority, then clients and their batches in turn, then rank:
   `waiting_queue`) while tokens of the budget are left (so no running prefill is still short of blocks), all blocks for
   the tokens they know fit in what is available, less a watermark of 1 % of the pool (at least a block; none when
   nothing runs, or the policy reserves ahead), no request was preempted in this step, and its LoRA adapter, if it has
   one, runs already or is one of `max_adapters`. One that does not fit is not overtaken. Waiting requests, whatever
   their priority, preempt running ones in one case alone: a client that runs nothing gets a place from clients that run
   several requests, a batch that runs nothing from batches of the same client that do (`turns`). Whoever gives way
   goes on running something, so the number of clients, or of a client's batches, that run grows each time; nobody makes
   way for a lower priority. Policies that reserve know no such turns.
5. Drafts come last: requests that are one token short have guesses checked with it, where the budget, the blocks and
   `max_num_seqs` (of tokens sampled in a step) leave room. Nobody gives up blocks for a draft, and those of wrong ones
   are given back when the step is committed.
6. Further completions of a prompt are held back until it is computed, and then share its blocks (`fork`).

While a step runs, the next one may be scheduled (`schedule_beside`): requests are taken to be where that step leaves
them, nobody is preempted, and nobody goes past an end that is known. Where more must be known, it says so
(`why_not_beside`) and the step is scheduled once the one before is committed. Blocks are let go of at once when a
request ends, though a step in flight may still read and write them: its rows run before all that is launched for
whoever has the blocks next, and what they hold is found by nobody, since only a commit enters blocks into the prefix
cache.

Between two steps a person may preempt a running request (`preempt`), evict and pin cached blocks (`evict`, `pin`) and
change the limits (`set_limits`). Rule 3 holds beside pinned blocks: `add_request` and `pin` refuse what could not
run alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from kvscope_engine.policy.allocation.protocol import AllocationPolicy
from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.drafting.drafter import Drafter
from kvscope_engine.policy.fit import BlockNeeds
from kvscope_engine.policy.plan import StepPlan
from kvscope_engine.policy.prefixes.prefix_index import Prefix
from kvscope_engine.policy.ranked_queue import RankedQueue
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling import ahead as ahead_of
from kvscope_engine.policy.scheduling import causes
from kvscope_engine.policy.scheduling.admission import Admission
from kvscope_engine.policy.scheduling.ahead import Ahead
from kvscope_engine.policy.scheduling.block_tables import BlockTables
from kvscope_engine.policy.scheduling.changes import ChangeLog, RequestChanges
from kvscope_engine.policy.scheduling.drafting import Drafting
from kvscope_engine.policy.scheduling.held_forks import HeldForks
from kvscope_engine.policy.scheduling.pinning import check_fits_beside_pins, check_pins
from kvscope_engine.policy.scheduling.plan_builder import PlanBuilder
from kvscope_engine.policy.scheduling.preemption import GivenUp, Preemption, victim_order
from kvscope_engine.policy.scheduling.turns import Turns
from kvscope_engine.policy.scheduling.writing import write_down
from kvscope_engine.policy.state_pool import StatePool
from kvscope_engine.policy.tiers.lower_tiers import LowerTiers
from kvscope_engine.policy.tiers.mover_protocol import TierMover
from kvscope_engine.policy.tiers.swap_costs import PrefillRate
from kvscope_engine.policy.totals import Totals
from kvscope_engine.policy.waiting_queue import WaitingQueue
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import FinishReason
from kvscope_telemetry.messages.request_state import RequestState, WaitsFor
from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.running_time import RunningTime

MOST_RESTARTS: Final = 8
"""Of a request that gets no further. Steps are half as large after each failure: of 256 requests it is alone then."""


class Scheduler:
    """Continuous batching over a block pool.

    `max_num_seqs` requests and `max_num_batched_tokens` tokens run in a step at most, with `max_adapters` LoRA
    adapters among them; a request may not grow beyond `max_model_len` tokens. With a `mover` the pool's places in lower
    tiers are used; `preemption` is one of `recompute`, `swap` and `auto`.
    """

    def __init__(
        self,
        pool: BlockPool,
        allocation: AllocationPolicy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        mover: TierMover | None = None,
        preemption: str = "auto",
        drafter: Drafter | None = None,
        states: StatePool | None = None,
        max_adapters: int = 0,
    ) -> None:
        self._pool = pool
        self.max_num_seqs = max_num_seqs
        """Requests that run in a step at most; `set_limits` changes it, and the next."""
        self.max_num_batched_tokens = max_num_batched_tokens
        self._token_cap: int | None = None
        self._eased: tuple[int, int] | None = None
        self._max_model_len = max_model_len
        self._max_adapters = max_adapters
        self._allocation = allocation
        self._reserves = allocation.reserves
        self._waiting = WaitingQueue()
        self._running = RankedQueue()
        self._requests: dict[int, Request] = {}
        self._changes = ChangeLog(pool.moves)
        self._held = HeldForks()
        self.totals = Totals()
        self.running_time = RunningTime()
        """By the clock of its callers; whoever drives the scheduler tells it when the engine stood still."""
        self.rate = PrefillRate()
        """Whoever runs the steps tells it how long they took."""
        self.tiers = None if mover is None else LowerTiers(pool, mover, self.totals, self._saved_rows_moved)
        self.tables = BlockTables(pool, allocation, self._changes, self.tiers)
        self._preemption = Preemption(self.tables, self.tiers, self.rate, pool.block_size, preemption, states)
        watermark = 0 if allocation.reserves else max(1, pool.num_blocks // 100)
        self.states = states
        """Of the states of recurrent layers; None where a model has no such layers."""
        self._needs = BlockNeeds(pool.groups, pool.block_size, max_num_batched_tokens)
        self._admission = Admission(
            *(pool, self.tables, self.tiers, self.rate, self.totals, watermark, self.running_time, self._needs, states)
        )
        self._turns = Turns(self._waiting, self._running, pool, self._admission)
        self._disk_failure = ""
        self.drafting = None if drafter is None or self._reserves else Drafting(drafter, self.tables)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, new, preempted, and held back for their prompt."""
        return len(self._waiting) + len(self._held)

    @property
    def requests(self) -> Mapping[int, Request]:
        """All unfinished requests by number, in the order they came."""
        return self._requests

    @property
    def max_request_tokens(self) -> int:
        """The longest prompt and output together that is accepted, of a text that begins with no pinned block."""
        if self._reserves:  # and nothing is pinned
            return min(self._max_model_len, self._allocation.max_request_tokens)
        return self._needs.longest(self._pool.num_usable - len(self._pool.pinned), self._max_model_len)

    def prefix_of(self, row: int) -> Prefix | None:
        """What can be found in a row of the ledger, whichever tier it is of; None for every other. Of a kept recurrent
        state: what the block before it holds, in the first KV group."""
        if row < self._pool.num_blocks:
            return self._pool.prefix(row)
        if row >= self._pool.first_state:
            return None if self.states is None else self.states.prefix(row)
        return None if self.tiers is None else self.tiers.prefix(row)

    def check_fits(self, request: Request) -> None:
        """Raise BadInput, with the numbers, when the request could not even run alone. Changes nothing."""
        self._needs.check_fits(request, self._pool.num_usable, self._max_model_len)
        self._allocation.check_fits(request)
        check_fits_beside_pins(self._pool, self._needs, request)

    def add_request(self, request: Request) -> None:
        """Take a new request into the queue. Raises BadInput, and notes the refusal, as `check_fits` does."""
        assert request.number not in self._requests, f"request {request.number} was added twice"
        try:
            self.check_fits(request)
        except BadInput as error:
            self.refuse(str(error), request.arrival_ns, number=request.number)
            raise
        self._requests[request.number] = request
        self.tables.begin(request)
        if self._is_held_back(request):
            request.waits_for = WaitsFor.PROMPT
            self._held.add_request(request)
        else:
            self._waiting.add_request(request)
        self._changes.add(request)

    def list_aborted(self, request: Request, now_ns: int) -> None:
        """Note a request that was aborted before it got here: it is listed, and never queued."""
        request.state, request.finish_reason = RequestState.FINISHED, "abort"
        self.totals.aborted += 1
        self._changes.add(request)
        self._changes.event(causes.aborted(request, now_ns, 0, "requested by the client before its prompt was read"))

    def refuse(self, cause: str, now_ns: int, *, number: int = 0) -> None:
        """Note that a request was refused before it got here (`add_request` notes its own refusals)."""
        self.totals.refused += 1
        self._changes.event(causes.refused(number, now_ns, cause))

    def note(self, what: str, now_ns: int) -> None:
        """Something that is not as it was asked for, for the events."""
        self.tell(Event(kind="note", time_ns=now_ns, cause=what))

    def tell(self, event: Event) -> None:
        """Something that happened to the engine and no request, for the events."""
        self._changes.event(event)

    def schedule(self, step: int, now_ns: int) -> StepPlan:
        """Decide the step: blocks for every scheduled token are in the tables when this returns.

        Nothing but `schedule_beside` may be called until the plan was committed. An empty plan means nothing is
        unfinished, or all that is waits for its form.
        """
        self._pool.step = step
        return self._schedule(Ahead(), now_ns)

    def why_not_beside(self, running: StepPlan) -> str:
        """Why the next step cannot be scheduled while `running`, the last plan, is in flight; empty: it can."""
        if self._reserves:
            return ahead_of.RESERVED
        if self.states is not None:
            return ahead_of.STATES
        if self.tables.any_shares_tail or (self._held and any(map(self._held.are_freed_by, running.scheduled))):
            return ahead_of.FORKED
        if self.drafting is not None and self.drafting.is_wanted_after(running):
            return ahead_of.DRAFTED
        may_admit = self._waiting and len(self._running) < self.max_step_requests
        if may_admit and self._pool.index is not None and ahead_of.computes_prompts(running):
            return ahead_of.SHARED
        if self._victims_of_turn():
            return ahead_of.TURN
        return "" if self._has_room_beside(Ahead(running)) else ahead_of.SHORT

    def schedule_beside(self, running: StepPlan, now_ns: int) -> StepPlan:
        """As `schedule`, while `running` is in flight and `why_not_beside` has no reason.

        The new plan is to be launched and committed after it. What is taken for it now is dated as of the step that
        runs, whose frame will tell of it. Empty: nothing can follow before that one is committed.
        """
        return self._schedule(Ahead(running), now_ns)

    def _schedule(self, ahead: Ahead, now_ns: int) -> StepPlan:
        builder = PlanBuilder(self.max_step_tokens, now_ns)
        if self.states is not None:
            self.states.drop_uncommitted()
        evicted_before, offloaded_before = self._pool.evicted_blocks, self.totals.offloaded_blocks
        states_before = self.states.num_offloaded if self.states is not None else 0
        self._continue_prefills(self._continue_decodes(builder, ahead), builder, ahead)
        if not builder.has_preempted:
            self._admit(builder, self._victims_of_turn() if builder.budget and not ahead else [])
        assert not (ahead and builder.has_preempted), "a request in flight was preempted"
        if self.drafting is not None and not ahead and not builder.has_preempted:
            self.drafting.add(builder, self._pool.step, self.max_step_requests)
        if builder.evicted_for:
            count = self._pool.evicted_blocks - evicted_before
            num_offloaded = self.totals.offloaded_blocks - offloaded_before
            self._changes.event(causes.evicted(count, num_offloaded, builder.evicted_for, now_ns))
        self.totals.copied_blocks += builder.num_copied
        if self.tiers is not None:
            self._flush(self.tiers, now_ns)
        plan = builder.plan()
        if self.states is not None and plan.scheduled:
            copies, saves = self.states.plan(plan.scheduled)
            plan = replace(plan, state_copies=copies, state_saves=saves)
            if evicted := self.states.take_evicted():
                num_offloaded = self.states.num_offloaded - states_before
                self._changes.event(causes.states_evicted(evicted, num_offloaded, now_ns))
        return plan

    def commit(self, plan: StepPlan, step: int, now_ns: int) -> None:
        """The plan was run: its tokens are in their blocks. Requests that ended meanwhile are left alone."""
        self._pool.step = step
        self.totals.recomputed_tokens += write_down(plan, self._pool, step)
        self.tables.settle(step)
        if self.states is not None:
            self.states.commit(plan.scheduled, plan.state_saves)
        if self.drafting is not None:
            self.drafting.settle(plan, step, self.totals)
        if self._held:
            for item in plan.scheduled:
                if item.request.num_computed_tokens >= item.request.num_prompt_tokens:
                    self._fork_held(item.request, now_ns)
        if self.tables.lets_go:
            for item in plan.scheduled:
                if item.request.state is RequestState.RUNNING:
                    self.tables.let_go_unread(item.request, step)

    def finish(self, request: Request, reason: FinishReason, now_ns: int) -> None:
        """End a request that is done (or failed) and let go of its blocks. Nothing happens when it ended."""
        if request.is_finished:
            return
        num_blocks = self._end(request, reason)
        self.totals.finished += 1
        self._changes.event(causes.finished(request, now_ns, num_blocks))

    def abort(self, request: Request, now_ns: int, cause: str = "requested by the client") -> None:
        """End a request in any state, also between schedule and commit. Nothing happens when it ended."""
        if request.is_finished:
            return
        num_blocks = self._end(request, "abort")
        self.totals.aborted += 1
        self._changes.event(causes.aborted(request, now_ns, num_blocks, cause))

    def fork(self, parent: Request, child: Request, now_ns: int) -> None:
        """Let `child`, a new request, run on the parent's blocks.

        Its tokens must start with the parent's computed ones; one of its own at least is left to compute. Full blocks
        stay shared; a partial last block is copied (`StepPlan.copies`) once either writes to it. When the parent does
        not run, as many requests run as may, or the policy reserves blocks (nothing is shared then), the child waits
        in the queue like any other. Raises BadInput as `add_request` does.
        """
        self.add_request(child)
        self._fork(parent, child, now_ns)

    def reset_prefix_cache(self, now_ns: int) -> int:
        """Forget every cached prefix; returns how many idle blocks became free."""
        count = self._pool.reset_prefix_cache()
        if self.tiers is not None:
            self.tiers.reset()
        if self.states is not None:
            self.states.reset()
        self._changes.event(causes.cache_reset(count, now_ns))
        return count

    def preempt(self, request: Request, how: str, by: str, now_ns: int) -> GivenUp | None:
        """A running request gives up its blocks and goes back to the queue, for `by`; never amid a step.

        `how` as in `Preemption`. None, and nothing done, when `swap` was asked for and no lower tier has room.
        """
        builder = PlanBuilder(0, now_ns)
        given_up = self._preemption.give_up_asked(request, self._pool.step, builder, how)
        if given_up is not None:
            self._changes.event(causes.preempted_by(request, by, given_up, now_ns))
            self._send_back(request, now_ns)
            if self.tiers is not None:
                self._flush(self.tiers, now_ns)
        return given_up

    def restart(self, request: Request, why: str, now_ns: int) -> bool:
        """A running request whose step failed, and whose recurrent state may not be that of its tokens any more, goes
        back to the queue to be computed again. False, and nothing done: it has no such state, or that was of no use
        `MOST_RESTARTS` times since its last token.

        As `abort`, it may be called between schedule and commit.
        """
        if request.state_slot < 0:
            return False
        if request.num_tokens != request.restarted_at:
            request.restarted_at, request.num_restarts = request.num_tokens, 0
        if request.num_restarts == MOST_RESTARTS:
            return False
        request.num_restarts += 1
        given_up = self._preemption.give_up_asked(request, self._pool.step, PlanBuilder(0, now_ns), "recompute")
        assert given_up is not None, "there is always room to compute"
        self._changes.event(causes.restarted(request, why, given_up, now_ns))
        self._send_back(request, now_ns)
        return True

    def evict(self, blocks: list[int], by: str, now_ns: int) -> int:
        """Evictable `blocks` (each once) lose their prefix, for `by`; how many went to host memory."""
        offloaded_before = self.totals.offloaded_blocks
        self._pool.evict(blocks)
        num_offloaded = self.totals.offloaded_blocks - offloaded_before
        self._changes.event(causes.evicted_by(len(blocks), num_offloaded, by, now_ns))
        if self.tiers is not None:
            self._flush(self.tiers, now_ns)
        return num_offloaded

    def pin(self, blocks: list[int]) -> None:
        """These hashed blocks are not evicted. Raises BadInput, and does nothing, when a request could not run then."""
        check_pins(self._pool, self._needs, self._requests.values(), blocks)
        self._pool.pin(blocks)

    def set_limits(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """For the steps from now on. Nobody who runs is sent away: fewer are let in until fewer run."""
        assert min(max_num_seqs, max_num_batched_tokens) > 0, "a batch of nothing"
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens

    def ease(self, limits: tuple[int, int] | None) -> None:
        """Tokens and requests that steps have at most for now, whatever `set_limits` says; None: what it says."""
        assert limits is None or min(limits) > 0, "a batch of nothing"
        self._eased = limits

    @property
    def max_step_tokens(self) -> int:
        """Tokens that a step computes at most now."""
        most = self.max_num_batched_tokens if self._eased is None else min(self.max_num_batched_tokens, self._eased[0])
        return most if self._token_cap is None else min(most, self._token_cap)

    @property
    def max_step_requests(self) -> int:
        """Requests that run in a step at most now."""
        return self.max_num_seqs if self._eased is None else min(self.max_num_seqs, self._eased[1])

    def cap_tokens(self, max_tokens: int | None) -> None:
        """Steps from now on compute no more than these, whatever `set_limits` says; None: what it says."""
        assert max_tokens is None or max_tokens > 0, "a batch of nothing"
        self._token_cap = max_tokens

    def put_away(self, may_go_on: Callable[[], bool]) -> None:
        """At the end, when nothing is scheduled any more: cached prefixes go to disk, to be kept, while `may_go_on`."""
        if self.tiers is not None:
            self.tiers.put_away(may_go_on)

    def take_changes(self) -> RequestChanges:
        """What happened since the last call, events among it."""
        return self._changes.drain()

    def take_events(self) -> tuple[Event, ...]:
        """Only the events since the last call, for who wants no more."""
        return self._changes.take_events()

    def check_integrity(self) -> None:
        """Raise AssertionError, saying what is wrong and where, unless pool and requests agree."""
        self._pool.check_integrity(self._allocation.holders(self._requests.values()))
        if self.tiers is not None:
            self.tiers.check_integrity(self._requests.values())
        if self.states is not None:
            self.states.check_integrity(self._requests.values())

    def _continue_decodes(self, builder: PlanBuilder, ahead: Ahead) -> list[Request]:
        """Schedule running requests that miss one token; returns the others."""
        prefills, is_beside = [], bool(ahead)
        for request in list(self._running):  # those preempted meanwhile are still in this list
            if request.state is not RequestState.RUNNING or (is_beside and ahead.ends(request)):
                continue
            start, known = ahead.span(request)
            if start + 1 < known:
                prefills.append(request)
            elif builder.budget and not request.awaits_its_form and self._make_room(request, start + 1, builder):
                builder.add(request, start, 1, True)
        return prefills

    def _continue_prefills(self, prefills: list[Request], builder: PlanBuilder, ahead: Ahead) -> None:
        for request in prefills:
            if builder.budget and request.state is RequestState.RUNNING:
                self._schedule_chunk(request, ahead.span(request)[0], builder)

    def _schedule_chunk(self, request: Request, start: int, builder: PlanBuilder) -> None:
        """Schedule as many of the request's tokens, which it knows, as the budget leaves.

        The last one, after which a token is sampled, waits until its form says which may come.
        """
        known = request.num_tokens
        count = min(known - start, builder.budget)
        if start + count == known and request.awaits_its_form:
            count -= 1
        if count and self._make_room(request, start + count, builder):
            builder.add(request, start, count, start + count == known)

    def _has_room_beside(self, ahead: Ahead) -> bool:
        """Whether all who run can go on, to the last token that they know, without anybody giving up blocks."""
        needed = available = 0
        for request in self._running:
            if not ahead.ends(request):
                needed += self.tables.num_needed(request, ahead.span(request)[1])
                available = self.tables.num_available(request)
        return needed <= available

    def _victims_of_turn(self) -> list[Request]:
        """Running requests that make way for the first that waits."""
        if not self._waiting or self._reserves or not self._running or not self._may_adapt(self._waiting.first):
            return []
        return self._turns.victims_for_first(self.max_step_requests)

    def _admit(self, builder: PlanBuilder, victims: list[Request]) -> None:
        """Let in who is next while there is room; `victims` make way, for one alone. Who is still next is
        told what it waits for."""
        if victims:
            self._make_way(self._waiting.first, victims, builder)
        while self._waiting:
            request = self._waiting.first
            if len(self._running) >= self.max_step_requests:
                self._tell_wait(request, WaitsFor.PLACE)
                return
            if not builder.budget:
                self._tell_wait(request, WaitsFor.BUDGET)
                return
            found = self._admission.find(request)
            if not self._admission.fits(request, found, is_alone=not self._running):
                self._tell_wait(request, WaitsFor.BLOCKS)
                return
            if not self._may_adapt(request):
                self._tell_wait(request, WaitsFor.ADAPTER)
                return
            if request.awaits_its_form and found.num_tokens + 1 >= request.num_tokens:
                self._tell_wait(request, WaitsFor.GRAMMAR)  # nothing could be computed for it
                return
            self._waiting.remove(request)
            event = self._admission.start(request, found, builder)
            self._run(request, builder.now_ns)
            self._changes.event(event)
            self._schedule_chunk(request, request.num_computed_tokens, builder)
            if victims:
                return

    def _may_adapt(self, request: Request) -> bool:
        """Whether the request's adapter, if it has one, runs already or may run as well."""
        if request.adapter is None:
            return True
        running = {other.adapter for other in self._running if other.adapter is not None}
        return request.adapter in running or len(running) < self._max_adapters

    def _tell_wait(self, request: Request, waits_for: WaitsFor) -> None:
        if request.waits_for is not waits_for:
            request.waits_for = waits_for
            self._changes.touch(request)

    def _make_way(self, first: Request, victims: list[Request], builder: PlanBuilder) -> None:
        builder.has_preempted = True
        for victim in victims:
            given_up = self._preemption.give_up(victim, self._pool.step, builder)
            self._changes.event(causes.made_way(victim, first, given_up, builder.now_ns))
            self._send_back(victim, builder.now_ns)

    def _run(self, request: Request, now_ns: int) -> None:
        if request.admitted_ns is None:
            request.admitted_ns = now_ns
            self.totals.admitted += 1
        request.state, request.waits_for = RequestState.RUNNING, WaitsFor.UNTOLD
        self._running.add(request)
        self._waiting.start(request)
        self._changes.touch(request)
        self._state_moved(request)

    def _make_room(self, request: Request, stop: int, builder: PlanBuilder) -> bool:
        """Slots of its own up to position `stop`, preempting where needed. False: it was preempted itself."""
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
        return victim_order(request, self._waiting.held_by_client(request).num_tokens)

    def _preempt(self, victim: Request, needy: Request, needed: int, available: int, builder: PlanBuilder) -> None:
        """The victim goes back to the queue without blocks."""
        builder.has_preempted = True
        given_up = self._preemption.give_up(victim, self._pool.step, builder)
        self._changes.event(causes.preempted(victim, needy, needed, available, given_up, builder.now_ns))
        self._send_back(victim, builder.now_ns)

    def _send_back(self, victim: Request, now_ns: int) -> None:
        """A request that gave up its blocks waits again."""
        self._running.remove(victim)
        self._waiting.stop(victim)
        self._state_moved(victim)
        victim.num_preemptions += 1
        victim.preempted_ns = now_ns
        victim.state = RequestState.PREEMPTED
        self._changes.touch(victim)
        self._waiting.add_request(victim)
        self.totals.preemptions += 1

    def _state_moved(self, request: Request) -> None:
        """The request has another state, or none any more."""
        if self.states is not None:
            self._changes.table(request, 0, self.states.group)

    def _is_held_back(self, child: Request) -> bool:
        """Whether its parent's prompt is still to be computed, by a request that will."""
        parent = self._requests.get(child.parent)
        return parent is not None and parent.num_computed_tokens < parent.num_prompt_tokens and not self._reserves

    def _fork_held(self, parent: Request, now_ns: int) -> None:
        """The parent's prompt is computed, or never will be: those that waited for it go on."""
        for child in self._held.take(parent):
            self._tell_wait(child, WaitsFor.UNTOLD)
            self._waiting.add_request(child)
            self._fork(parent, child, now_ns)

    def _fork(self, parent: Request, child: Request, now_ns: int) -> None:
        """Let a waiting child run on the parent's blocks, where that can be."""
        if parent.state is not RequestState.RUNNING or len(self._running) >= self.max_step_requests or self._reserves:
            return
        if self.states is not None and not (self.states.num_available and self._is_where(parent, child)):
            return
        self._waiting.remove(child)
        child.num_computed_tokens = child.num_cached_tokens = min(parent.num_computed_tokens, child.num_tokens - 1)
        self.totals.begin(child.num_prompt_tokens, child.num_cached_tokens)
        self.tables.share(parent, child)
        if self.states is not None:
            self.states.fork(parent, child)
        self._run(child, now_ns)
        self._changes.event(causes.forked(parent, child, now_ns, self.running_time))

    def _is_where(self, parent: Request, child: Request) -> bool:
        """Whether the child can go on from the parent's state: that is of all tokens that the parent has computed."""
        return parent.num_computed_tokens <= child.num_tokens - 1

    def _flush(self, tiers: LowerTiers, now_ns: int) -> None:
        """The bytes are where the plan needs them; a disk that failed meanwhile is told of once."""
        tiers.flush()
        if tiers.failure and tiers.failure != self._disk_failure:
            self._disk_failure = tiers.failure
            self._changes.event(causes.disk_failed(tiers.failure, now_ns))

    def _saved_rows_moved(self, request: Request) -> None:
        self._changes.table(request, 0)

    def _end(self, request: Request, reason: FinishReason) -> int:
        """Take a request out of wherever it is; returns how many blocks it held."""
        num_blocks = self.tables.num_held(request)
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
            self._waiting.stop(request)
        else:
            (self._held if request in self._held else self._waiting).remove(request)
        self.tables.release(request, self._pool.step)
        if self.states is not None:
            self.states.release(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        if self.drafting is not None:
            self.drafting.forget(request)
        del self._requests[request.number]
        self._changes.touch(request)
        for child in self._held.take(request):
            self._tell_wait(child, WaitsFor.UNTOLD)
            self._waiting.add_request(child)
        return num_blocks
