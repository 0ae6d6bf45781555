"""The scheduler: who runs in a step, with how many tokens, and who waits.

Owns the queue, the running requests and, of each request, state, block table and `num_computed_tokens`.
Knows no tensors and no clock: times come with the calls.

The rules, in the order they are applied in each step:

1. Order of service is by rank: higher priority first, then earlier arrival. It decides everything below.
2. Running requests go on: those one token short (decode) first, then prefills, in chunks that fit what is
   left of `max_num_batched_tokens`. Blocks are taken as tokens come.
3. When a running request needs a block and there is none, the running request of the last rank gives up all
   its blocks and goes back to the queue, where its rank puts it before all that were never admitted (of its
   priority). It keeps its tokens and computes them again, less what the prefix cache still holds. A request
   thus never loses its blocks to one that ranks after it, and the first always goes on: `add` refused what
   could not run alone.
4. Waiting requests are admitted by rank while tokens of the budget are left (so no running prefill is still
   short of blocks), all blocks for the tokens they know fit in what is available, less a watermark of 1 % of
   the pool (at least a block; none when nothing runs, or the policy reserves ahead), and no request was
   preempted in this step. One that does not fit is not overtaken. Waiting requests, whatever their priority,
   never preempt running ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvscope_engine.policy import causes
from kvscope_engine.policy.allocation import AllocationPolicy
from kvscope_engine.policy.block_pool import BlockPool
from kvscope_engine.policy.block_tables import BlockTables
from kvscope_engine.policy.changes import ChangeLog, Changes
from kvscope_engine.policy.draft import Draft
from kvscope_engine.policy.fit import check_fits, num_blocks_for
from kvscope_engine.policy.plan import StepPlan
from kvscope_engine.policy.ranked_queue import RankedQueue
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.request_prefixes import find_prefix
from kvscope_engine.policy.totals import Totals
from kvscope_engine.policy.writing import write_down
from kvscope_telemetry.commands import FinishReason
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages import Event
from kvscope_telemetry.requests import RequestState


class Scheduler:
    """Continuous batching over a block pool.

    `max_num_seqs` requests and `max_num_batched_tokens` tokens run in a step at most; a request may not grow
    beyond `max_model_len` tokens.
    """

    def __init__(
        self,
        pool: BlockPool,
        allocation: AllocationPolicy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._allocation = allocation
        self._watermark = 0 if allocation.reserves else max(1, pool.num_blocks // 100)
        self._waiting = RankedQueue()
        self._running = RankedQueue()
        self._requests: dict[int, Request] = {}
        self._changes = ChangeLog()
        self._tables = BlockTables(pool, allocation, self._changes)
        self._step = 0
        self.totals = Totals()

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, new and preempted."""
        return len(self._waiting)

    @property
    def requests(self) -> Mapping[int, Request]:
        """All unfinished requests by number, in the order they came."""
        return self._requests

    @property
    def max_request_tokens(self) -> int:
        """The longest prompt and output together that `add` takes."""
        return min(self._max_model_len, self._allocation.max_request_tokens)

    def check_fits(self, request: Request) -> None:
        """Raise BadInput, with the numbers, when the request could not even run alone. Changes nothing."""
        check_fits(
            request,
            num_blocks=self._pool.num_blocks,
            block_size=self._pool.block_size,
            max_model_len=self._max_model_len,
        )
        self._allocation.check_fits(request)

    def add(self, request: Request) -> None:
        """Take a new request into the queue. Raises BadInput, and notes the refusal, as `check_fits` does."""
        assert request.number not in self._requests, f"request {request.number} was added twice"
        try:
            self.check_fits(request)
        except BadInput as error:
            self.refuse(str(error), request.arrival_ns, number=request.number)
            raise
        self._requests[request.number] = request
        self._waiting.add(request)
        self._changes.add(request)

    def refuse(self, cause: str, now_ns: int, *, number: int = 0) -> None:
        """Note that a request was refused before it got here (`add` notes its own refusals)."""
        self.totals.refused += 1
        self._changes.event(causes.refused(number, now_ns, cause))

    def schedule(self, step: int, now_ns: int) -> StepPlan:
        """Decide the step: blocks for every scheduled token are in the tables when this returns.

        Nothing else may be scheduled until the plan was committed. An empty plan means nothing is unfinished.
        """
        self._step = step
        draft = Draft(self._max_num_batched_tokens, now_ns)
        evicted_before = self._pool.evicted_blocks
        self._continue_prefills(self._continue_decodes(draft), draft)
        if not draft.has_preempted:
            self._admit(draft)
        if draft.evicted_for:
            count = self._pool.evicted_blocks - evicted_before
            self._changes.event(causes.evicted(count, draft.evicted_for, now_ns))
        return draft.plan()

    def commit(self, plan: StepPlan, step: int) -> None:
        """The plan was run: its tokens are in their blocks. Requests that ended meanwhile are left alone."""
        self._step = step
        self.totals.prompt_tokens += write_down(plan, self._pool, step)
        self._tables.settle(step)

    def finish(self, request: Request, reason: FinishReason, now_ns: int) -> None:
        """End a request that is done (or failed) and let go of its blocks. Nothing happens when it ended."""
        if request.is_finished:
            return
        num_blocks = self._end(request, reason)
        self.totals.finished += 1
        self._changes.event(causes.finished(request, now_ns, num_blocks))

    def abort(self, request: Request, now_ns: int, cause: str = "the client asked for it") -> None:
        """End a request in any state, also between schedule and commit. Nothing happens when it ended."""
        if request.is_finished:
            return
        num_blocks = self._end(request, "abort")
        self.totals.aborted += 1
        self._changes.event(causes.aborted(request, now_ns, num_blocks, cause))

    def fork(self, parent: Request, child: Request, now_ns: int) -> None:
        """Let `child`, a new request with the same tokens, run on the parent's blocks.

        Its tokens must start with the parent's computed ones. Full blocks stay shared; a partial last block
        is copied (`StepPlan.copies`) once either writes to it. When the parent does not run, as many requests
        run as may, or the policy reserves blocks (nothing is shared then), the child waits in the queue like
        any other. Raises BadInput as `add` does.
        """
        self.add(child)
        if parent.state is not RequestState.RUNNING or len(self._running) >= self._max_num_seqs:
            return
        if self._allocation.reserves:
            return
        computed = parent.num_computed_tokens
        assert child.num_tokens > computed, f"request {child.number} is shorter than what it is forked from"
        self._waiting.remove(child)
        self._tables.share(parent, child)
        child.num_computed_tokens = computed
        self._run(child, now_ns)
        self._changes.event(causes.forked(parent, child, now_ns))

    def reset_prefix_cache(self, now_ns: int) -> int:
        """Forget every cached prefix; returns how many idle blocks became free."""
        count = self._pool.reset_prefix_cache()
        self._changes.event(causes.cache_reset(count, now_ns))
        return count

    def take_changes(self) -> Changes:
        """What happened since the last call, events among it."""
        return self._changes.take()

    def take_events(self) -> tuple[Event, ...]:
        """Only the events since the last call, for who wants no more."""
        return self._changes.take_events()

    def check_integrity(self) -> None:
        """Raise AssertionError, saying what is wrong and where, unless pool and requests agree."""
        self._pool.check_integrity(self._allocation.holders(self._requests.values()))

    def _continue_decodes(self, draft: Draft) -> list[Request]:
        """Schedule running requests that miss one token; returns the others."""
        prefills = []
        for request in self._running:
            stop = request.num_computed_tokens + 1
            if stop < request.num_tokens:
                prefills.append(request)
            elif draft.budget and self._make_room(request, stop, draft):
                draft.add(request, 1, True)
        return prefills

    def _continue_prefills(self, prefills: list[Request], draft: Draft) -> None:
        for request in prefills:
            if draft.budget and request.state is RequestState.RUNNING:
                self._schedule_chunk(request, draft)

    def _schedule_chunk(self, request: Request, draft: Draft) -> None:
        """Schedule as many of the request's tokens as the budget leaves."""
        start, known = request.num_computed_tokens, request.num_tokens
        count = min(known - start, draft.budget)
        if self._make_room(request, start + count, draft):
            draft.add(request, count, start + count == known)

    def _admit(self, draft: Draft) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs and draft.budget:
            request = self._waiting.first
            hits = find_prefix(self._pool, request)
            if not self._fits_now(request, hits):
                return
            self._waiting.pop_first()
            self._start(request, hits, draft)
            self._schedule_chunk(request, draft)

    def _fits_now(self, request: Request, hits: list[int]) -> bool:
        pool = self._pool
        available = self._tables.num_available(request) - pool.num_idle(hits)
        watermark = self._watermark if self._running else 0
        return num_blocks_for(request.num_tokens, pool.block_size) - len(hits) + watermark <= available

    def _start(self, request: Request, hits: list[int], draft: Draft) -> None:
        """A waiting request gets its place, and what the prefix cache holds of it."""
        pool = self._pool
        cached = len(hits) * pool.block_size
        self._tables.take_hits(request, hits, self._step)
        request.num_computed_tokens = cached
        if request.admitted_ns is None:
            request.num_cached_tokens = cached
        self.totals.cached_tokens += cached
        self._run(request, draft.now_ns)
        needed = num_blocks_for(request.num_tokens, pool.block_size)
        self._changes.event(causes.admitted(request, draft.now_ns, len(hits), needed, pool.block_size))

    def _run(self, request: Request, now_ns: int) -> None:
        if request.admitted_ns is None:
            request.admitted_ns = now_ns
            self.totals.admitted += 1
        request.state = RequestState.RUNNING
        self._running.add(request)
        self._changes.touch(request)

    def _make_room(self, request: Request, stop: int, draft: Draft) -> bool:
        """Slots of its own up to position `stop`, preempting where needed. False: it was preempted itself."""
        while needed := self._tables.num_needed(request, stop):
            available = self._tables.num_available(request)
            if needed <= available:
                self._tables.grow(request, needed, self._step, draft)
                return True
            victim = self._running.pop_last()
            self._changes.event(causes.preempted(victim, request, needed, available, draft.now_ns))
            self._preempt(victim, draft)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, draft: Draft) -> None:
        """The victim, taken out of the running ones, goes back to the queue without blocks."""
        draft.has_preempted = True
        draft.drop(victim)
        self._tables.release(victim, self._step)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.state = RequestState.PREEMPTED
        self._waiting.add(victim)
        self.totals.preemptions += 1

    def _end(self, request: Request, reason: FinishReason) -> int:
        """Take a request out of wherever it is; returns how many blocks it held."""
        num_blocks = self._tables.num_held(request)
        (self._running if request.state is RequestState.RUNNING else self._waiting).remove(request)
        self._tables.release(request, self._step)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        del self._requests[request.number]
        self._changes.touch(request)
        return num_blocks
