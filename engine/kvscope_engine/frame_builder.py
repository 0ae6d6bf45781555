"""Turns each step of the engine into one frame, with everything that changed since the last.

Owns the sequence numbers of an epoch, and what it needs to say what changed. It reads the pool, the scheduler
and their requests and writes none of them; it never blocks, and `publish` must not either.

How the engine calls it: `record` after each step, once the sampled tokens are in their requests;
`record_idle` whenever something may have changed without a step (requests added, aborted or refused while
nothing ran), so that a mirror equals the ledger once the engine is idle; `snapshot` when asked for one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.plan import StepPlan, StepResult
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.changes import RequestChanges
from kvscope_engine.policy.scheduling.scheduler import Scheduler
from kvscope_telemetry.ledger import pack_u4, pack_u8
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import (
    Batch,
    Counters,
    Frame,
    Hello,
    RequestInfo,
    RequestRows,
    Snapshot,
    Timings,
    Work,
)

MAX_U2 = (1 << 16) - 1
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
        changes: RequestChanges,
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
            requests=pack_requests(requests, changes.tables, changes.groups),
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

    def _forget_finished(self, changes: RequestChanges) -> None:
        for request in changes.touched:
            if request.is_finished:
                self._last_token_ns.pop(request.number, None)

    def _counters(self) -> Counters:
        totals, states = self._scheduler.totals, self._scheduler.states
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
            offloaded_blocks=totals.offloaded_blocks,
            loaded_blocks=totals.loaded_blocks,
            copied_blocks=totals.copied_blocks,
            lost_blocks=totals.lost_blocks,
            draft_tokens=totals.draft_tokens,
            accepted_tokens=totals.accepted_tokens,
            restored_tokens=totals.restored_tokens,
            recomputed_tokens=totals.recomputed_tokens,
            swapped_states=states.num_swapped if states is not None else 0,
            offloaded_states=states.num_offloaded if states is not None else 0,
            loaded_states=states.num_loaded if states is not None else 0,
        )


def _changed_requests(changes: RequestChanges, plan: StepPlan | None) -> list[Request]:
    """Requests that ran or changed, each once, in order of their first change.

    One that ended is told once, by `touched`: who joins later has never heard of it.
    """
    if plan is None:
        return list(changes.touched)
    ran = [item.request for item in plan.scheduled if item.request.state is RequestState.RUNNING]
    if not changes.touched:
        return ran
    return list(dict.fromkeys((*changes.touched, *ran)))


# Requests and batches as packed little-endian columns, the way frames and snapshots carry them.
def request_info(request: Request) -> RequestInfo:
    """What never changes about a request."""
    return RequestInfo(
        number=request.number,
        request_id=request.request_id,
        arrival_ns=request.arrival_ns,
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        priority=request.priority,
        index=request.index,
        adapter="" if request.adapter is None else request.adapter.name,
    )


def pack_requests(
    requests: Sequence[Request], tables: Mapping[int, int], groups: Mapping[tuple[int, int], int] | None = None
) -> RequestRows:
    """A row a request, and one more for each other KV group whose block table changed.

    `tables`: of those whose tables changed, how many of the first blocks of each did not; `groups`: the same of one
    table, by request and group. A swapped-out request's table is that of its rows in lower tiers.
    """
    rows: list[tuple[Request, int, int, list[int]]] = []
    for request in requests:
        for group, table in enumerate((*request.kv_tables, *request.state_tables)):
            start = min(tables.get(request.number, len(table)), len(table))
            if groups:
                start = min(start, groups.get((request.number, group), start))
            if not group or request.number in tables or (groups and (request.number, group) in groups):
                rows.append((request, group, start, table[start:]))
    if not rows:
        return RequestRows()
    return RequestRows(
        number=pack_u4([request.number for request, *_ in rows]),
        state=bytes([request.state for request, *_ in rows]),
        num_computed_tokens=pack_u4([request.num_computed_tokens for request, *_ in rows]),
        num_cached_tokens=pack_u4([request.num_cached_tokens for request, *_ in rows]),
        num_output_tokens=pack_u4([len(request.output_token_ids) for request, *_ in rows]),
        num_preemptions=_pack_u2([min(request.num_preemptions, MAX_U2) for request, *_ in rows]),
        table_start=pack_u4([start for _, _, start, _ in rows]),
        table_count=pack_u4([len(tail) for *_, tail in rows]),
        table_blocks=pack_u4([block for *_, tail in rows for block in tail]),
        num_draft_tokens=_pack_if_any([request.num_draft_tokens for request, *_ in rows]),
        num_accepted_tokens=_pack_if_any([request.num_accepted_tokens for request, *_ in rows]),
        table_group=_pack_if_any([group for _, group, _, _ in rows]),
        waits_for=_pack_if_any([request.waits_for for request, *_ in rows]),
    )


def pack_batch(plan: StepPlan) -> Batch:
    """Who ran. Decode tokens are single ones past the prompt, and drafts that were right; every other is prefill."""
    scheduled = plan.scheduled
    decodes = sum(item.start >= item.request.num_prompt_tokens for item in scheduled[: plan.num_single_token])
    decodes += sum(item.num_tokens for item in scheduled[plan.num_single_token :] if item.drafts)
    return Batch(
        number=pack_u4([item.request.number for item in scheduled]),
        num_tokens=pack_u4([item.num_tokens for item in scheduled]),
        num_prefill_tokens=plan.num_tokens - decodes,
        num_decode_tokens=decodes,
    )


def _pack_if_any(values: Sequence[int]) -> bytes:
    return pack_u4(values) if any(values) else b""


def _pack_u2(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}H", *values)
