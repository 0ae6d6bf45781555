"""Passes the data of each step to the frame builder: requests that ran or changed, their tokens, and counters.

Reads the pool, the scheduler and their requests, and modifies none of them. The engine calls `record` after each step,
when the sampled tokens have been added to their requests. It calls `record_idle` when something may have changed
without a step, so that a client's copy equals the ledger when the engine is idle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Final

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduler_totals import SchedulerTotals
from kvscope_engine.policy.scheduling.change_log import RequestChanges
from kvscope_engine.policy.scheduling.scheduler import Scheduler
from kvscope_engine.policy.step_plan import StepPlan, StepResult
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import (
    NO_WORK,
    Batch,
    Counters,
    Frame,
    Hello,
    RequestInfo,
    Snapshot,
    Timings,
    Work,
)
from kvscope_telemetry.producer.frame_builder import FrameBuilder, RequestUpdates, pack_batch

_TOTALS: Final = tuple(total.name for total in fields(SchedulerTotals))
"""Names of the counters that occur in both `SchedulerTotals` and `Counters`."""
_MAX_CLIENTS: Final = 10_000
"""Maximum number of clients that get a number per engine start. Later clients are published as 0, which means
unknown.
"""


class StepRecorder:
    """Publishes a frame for each step of one engine start (epoch).

    `publish` is called with each frame and must not block; `messages_dropped` returns the number of messages that the
    publisher has dropped.
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
        self._pool = pool
        self._scheduler = scheduler
        self._messages_dropped = messages_dropped
        self._builder = FrameBuilder(
            epoch, pool.ledger, pool.changed_rows.drain, publish=publish, running_time=scheduler.running_time
        )
        self._generation_tokens = 0
        self._clients: dict[str, int] = {}  # name or address, which is not published -> number

    @property
    def seq(self) -> int:
        """Sequence number of the last frame published; 0 before the first."""
        return self._builder.seq

    def record(
        self,
        plan: StepPlan | None,
        result: StepResult | None,
        timings: Timings,
        step: int,
        now_ns: int,
        work: Work = NO_WORK,
    ) -> None:
        """Publish the frame of a committed step, whose tokens have been added to the requests.

        `result` is None if the run failed; `plan` is None if nothing was scheduled.
        """
        if plan is not None and result is not None:
            requests = [item.request for item in plan.scheduled]
            new_tokens = zip(requests, map(len, result.token_ids), strict=True)
            self._generation_tokens += self._builder.count_tokens(new_tokens, now_ns)
        self._publish(self._scheduler.changes.drain(), plan, timings, step, now_ns, work)

    def record_idle(self, step: int, now_ns: int) -> bool:
        """Publish a frame of the changes made without a step. Returns False, and publishes nothing, if there
        were no changes.
        """
        changes = self._scheduler.changes.drain()
        if not changes and not self._pool.changed_rows:
            return False
        self._publish(changes, None, Timings(), step, now_ns, NO_WORK)
        return True

    def snapshot(self, hello: Hello, tag: int, now_ns: int) -> Snapshot:
        """Return the whole state as of frame `seq`, after publishing pending changes."""
        self.record_idle(self._builder.step, now_ns)
        requests = list(self._scheduler.requests.values())
        return self._builder.snapshot(hello, now_ns, self._counters(), requests, map(self._info, requests), tag=tag)

    def _publish(
        self, changes: RequestChanges, plan: StepPlan | None, timings: Timings, step: int, now_ns: int, work: Work
    ) -> None:
        self._builder.frame(
            step,
            now_ns,
            self._counters(),
            requests=RequestUpdates(
                new=tuple(map(self._info, changes.added)),
                changed=_changed_requests(changes, plan),
                unchanged_entries=changes.tables,
                unchanged_group_entries=changes.groups,
            ),
            batch=_batch_of(plan) if plan is not None else Batch(),
            timings=timings,
            events=changes.events,
            moves=changes.moves,
            work=work,
        )

    def _info(self, request: Request) -> RequestInfo:
        clients = self._clients
        if request.client and request.client not in clients and len(clients) < _MAX_CLIENTS:
            clients[request.client] = len(clients) + 1
        return RequestInfo(
            number=request.number,
            request_id=request.request_id,
            arrival_ns=request.arrival_ns,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            priority=request.priority,
            index=request.index,
            adapter="" if request.adapter is None else request.adapter.name,
            client=clients.get(request.client, 0),
        )

    def _counters(self) -> Counters:
        totals, states = self._scheduler.totals, self._scheduler.states
        return Counters(
            **{name: getattr(totals, name) for name in _TOTALS},
            generation_tokens=self._generation_tokens,
            evicted_blocks=self._pool.evicted_blocks,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            messages_dropped=self._messages_dropped(),
            swapped_states=states.num_swapped if states is not None else 0,
            offloaded_states=states.num_offloaded if states is not None else 0,
            loaded_states=states.num_loaded if states is not None else 0,
        )


def _changed_requests(changes: RequestChanges, plan: StepPlan | None) -> list[Request]:
    """Return the requests that ran or changed, each once, in order of their first change.

    An ended request is included only if it is in `changes.touched`, not because it is still in `plan`, so that its end
    is reported once.
    """
    if plan is None:
        return list(changes.touched)
    running = [item.request for item in plan.scheduled if item.request.state is RequestState.RUNNING]
    if not changes.touched:
        return running
    return list(dict.fromkeys((*changes.touched, *running)))


def _batch_of(plan: StepPlan) -> Batch:
    """Summarize a plan. Single tokens after the prompt and tokens of items with drafts count as decode tokens;
    all others count as prefill.
    """
    scheduled = plan.scheduled
    decodes = sum(item.start >= item.request.num_prompt_tokens for item in scheduled[: plan.num_single_token])
    decodes += sum(item.num_tokens for item in scheduled[plan.num_single_token :] if item.drafts)
    numbers = [item.request.number for item in scheduled]
    return pack_batch(numbers, [item.num_tokens for item in scheduled], num_decode_tokens=decodes)
