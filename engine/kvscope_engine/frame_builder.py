"""Turns each step of the engine into one frame, with everything that changed since the last.

Owns the sequence numbers of an epoch, and what it needs to say what changed. It reads the pool, the scheduler
and their requests and writes none of them; it never blocks, and `publish` must not either.

How the engine calls it: `record` after each step, once the sampled tokens are in their requests;
`record_idle` whenever something may have changed without a step (requests added, aborted or refused while
nothing ran), so that a mirror equals the ledger once the engine is idle; `snapshot` when asked for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.plan import StepPlan, StepResult
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.changes import Changes
from kvscope_engine.policy.scheduling.scheduler import Scheduler
from kvscope_engine.request_rows import pack_batch, pack_requests, pack_u8, request_info
from kvscope_telemetry.messages.request_words import RequestState
from kvscope_telemetry.messages.telemetry import Batch, Counters, Frame, Hello, Snapshot, Timings, Work

_NO_WORK: Final = Frame.__struct_defaults__[-1]


class FrameBuilder:
    """Frames of one epoch.

    `publish` takes each frame; `messages_dropped` tells how many messages the publisher threw away.
    """

    def __init__(
        self,
        epoch: int,
        pool: BlockPool,
        scheduler: Scheduler,
        publish: Callable[[Frame], object],
        *,
        messages_dropped: Callable[[], int] = lambda: 0,
    ) -> None:
        self._epoch = epoch
        self._pool = pool
        self._scheduler = scheduler
        self._publish = publish
        self._messages_dropped = messages_dropped
        self._seq = 0
        self._step = 0
        self._generation_tokens = 0
        self._last_token_ns: dict[int, int] = {}  # request number -> when it got its latest token

    @property
    def seq(self) -> int:
        """Number of the last frame published; 0 before the first."""
        return self._seq

    def record(
        self,
        plan: StepPlan | None,
        result: StepResult | None,
        timings: Timings,
        step: int,
        now_ns: int,
        work: Work = _NO_WORK,
    ) -> None:
        """Publish the frame of a step: its plan was committed, its tokens are in the requests.

        `result` is None when the step has none (the run failed); `plan` is None when nothing was scheduled.
        """
        first, inter = self._token_times(plan, result, now_ns)
        changes = self._scheduler.take_changes()
        batch = pack_batch(plan) if plan is not None else Batch()
        self._emit(changes, plan, batch, timings, (first, inter), step, now_ns, work)

    def record_idle(self, step: int, now_ns: int) -> bool:
        """Publish a frame of what changed without a step. False, and no frame, when nothing did."""
        changes = self._scheduler.take_changes()
        if not changes and not self._pool.has_changes:
            return False
        self._emit(changes, None, Batch(), Timings(), ([], []), step, now_ns)
        return True

    def snapshot(self, hello: Hello, tag: int, now_ns: int) -> Snapshot:
        """The whole state after frame `seq`; what was not published yet is published first."""
        self.record_idle(self._step, now_ns)
        requests = list(self._scheduler.requests.values())
        return Snapshot(
            hello=hello,
            seq=self._seq,
            step=self._step,
            time_ns=now_ns,
            blocks=self._pool.ledger.pack_all(),
            requests_info=tuple(map(request_info, requests)),
            requests=pack_requests(requests, dict.fromkeys(self._scheduler.requests, 0)),
            counters=self._counters(),
            tag=tag,
            stops=self._scheduler.running_time.since(min((r.arrival_ns for r in requests), default=now_ns)),
        )

    def _emit(
        self,
        changes: Changes,
        plan: StepPlan | None,
        batch: Batch,
        timings: Timings,
        token_times: tuple[list[int], list[int]],
        step: int,
        now_ns: int,
        work: Work = _NO_WORK,
    ) -> None:
        self._seq += 1
        self._step = step
        requests = _changed_requests(changes, plan)
        self._forget_finished(changes)
        frame = Frame(
            epoch=self._epoch,
            seq=self._seq,
            step=step,
            time_ns=now_ns,
            blocks=self._pool.ledger.pack(self._pool.take_changed()),
            new_requests=tuple(map(request_info, changes.added)),
            requests=pack_requests(requests, changes.tables),
            batch=batch,
            timings=timings,
            counters=self._counters(),
            events=changes.events,
            first_token_ns=pack_u8(token_times[0]),
            inter_token_ns=pack_u8(token_times[1]),
            moves=changes.moves,
            work=work,
        )
        self._publish(frame)

    def _token_times(
        self, plan: StepPlan | None, result: StepResult | None, now_ns: int
    ) -> tuple[list[int], list[int]]:
        """Running times to first tokens, and between tokens, of the requests that got one in this step."""
        first: list[int] = []
        inter: list[int] = []
        if plan is None or result is None:
            return first, inter
        latest, running_ns = self._last_token_ns, self._scheduler.running_time.running_ns
        for item, tokens in zip(plan.scheduled, result.token_ids, strict=True):
            if not tokens:
                continue
            request = item.request
            before = latest.get(request.number)
            latest[request.number] = now_ns
            if before is None:
                first.append(running_ns(request.arrival_ns, now_ns))
                inter += [0] * (len(tokens) - 1)
            else:
                inter += [running_ns(before, now_ns) // len(tokens)] * len(tokens)
        self._generation_tokens += len(first) + len(inter)
        return first, inter

    def _forget_finished(self, changes: Changes) -> None:
        for request in changes.touched:
            if request.is_finished:
                self._last_token_ns.pop(request.number, None)

    def _counters(self) -> Counters:
        totals = self._scheduler.totals
        return Counters(
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=totals.preemptions,
            admitted=totals.admitted,
            finished=totals.finished,
            aborted=totals.aborted,
            refused=totals.refused,
            evicted_blocks=self._pool.evicted_blocks,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            messages_dropped=self._messages_dropped(),
            swapped_blocks=totals.swapped_blocks,
            sunk_blocks=totals.sunk_blocks,
            loaded_blocks=totals.loaded_blocks,
            copied_blocks=totals.copied_blocks,
            lost_blocks=totals.lost_blocks,
            draft_tokens=totals.draft_tokens,
            accepted_tokens=totals.accepted_tokens,
            restored_tokens=totals.restored_tokens,
            recomputed_tokens=totals.recomputed_tokens,
        )


def _changed_requests(changes: Changes, plan: StepPlan | None) -> list[Request]:
    """Requests that ran or changed, each once, in order of their first change.

    One that ended is told once, by `touched`: who joins later has never heard of it.
    """
    if plan is None:
        return list(changes.touched)
    ran = [item.request for item in plan.scheduled if item.request.state is RequestState.RUNNING]
    if not changes.touched:
        return ran
    return list(dict.fromkeys((*changes.touched, *ran)))
