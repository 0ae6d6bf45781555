"""Creates events about requests: what happened to a request, and why.

Decides which data an event carries. `event_kinds` derives a text from it, which is sent too, for older readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from kvscope_engine.policy.prefixes.prefix_history import Miss
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.preemption import PreemptionRecord
from kvscope_engine.policy.scheduling.reusable_blocks import Reusable
from kvscope_telemetry.messages.event_kinds import aborted_text, emptied_text, evicted_text, finished_text, with_cause
from kvscope_telemetry.messages.telemetry import Event, EventData
from kvscope_telemetry.running_time import RunningTime


class Blocks(NamedTuple):
    """Number of blocks that a request's tokens need, and number reserved for the request (0 if the policy does
    not reserve).
    """

    num_needed: int
    num_reserved: int = 0


def admitted(
    request: Request,
    now_ns: int,
    found: Reusable,
    num_reused: int,
    blocks: Blocks,
    miss: Miss,
    running_time: RunningTime,
) -> Event:
    """Return the event of an admission.

    `blocks` are those for all known tokens, `num_reused` of which need not be computed. `found` has the cached blocks
    found before loading; `miss` is the reason why no more were found.
    """
    returns = request.num_preemptions > 0
    since_ns = request.preempted_ns if returns else request.arrival_ns
    data = EventData(
        kind="started",
        waited_ns=running_time.running_ns(since_ns, now_ns),
        stopped_ns=running_time.stopped_ns(since_ns, now_ns),
        num_known_tokens=request.num_tokens,
        num_pool_blocks=len(found.hits),
        num_loaded_blocks=found.num_to_load,
        num_lost_tokens=max(0, found.num_tokens - num_reused),
        missed=miss.kind,
        missed_token=miss.token,
        missed_step=miss.step,
        num_set_aside=blocks.num_reserved,
        num_states=int(request.state_slot >= 0 and num_reused > 0),
    )
    kind = "resumed" if returns else "admitted"
    event = Event(
        kind=kind, time_ns=now_ns, number=request.number, num_blocks=blocks.num_needed, num_tokens=num_reused, data=data
    )
    return with_cause(event)


def forked(parent: Request, child: Request, now_ns: int, running_time: RunningTime) -> Event:
    return with_cause(
        Event(
            kind="admitted",
            time_ns=now_ns,
            number=child.number,
            other=parent.number,
            num_blocks=len(child.held_blocks),
            num_tokens=child.num_computed_tokens,
            data=EventData(
                kind="forked",
                waited_ns=running_time.running_ns(child.arrival_ns, now_ns),
                stopped_ns=running_time.stopped_ns(child.arrival_ns, now_ns),
            ),
        )
    )


def preempted(victim: Request, needy: Request, why: EventData, record: PreemptionRecord, now_ns: int) -> Event:
    """Return the event of a preemption because `needy` needed more blocks than were available.

    `why` has the numbers of blocks and the reason why `victim` was chosen.
    """
    return _preemption_event(victim, record, why, now_ns, needy)


def preempted_for_fairness(victim: Request, needy: Request, record: PreemptionRecord, now_ns: int) -> Event:
    """Return the event of a preemption because the client or batch of `needy` ran nothing, and the victim's ran
    several requests.
    """
    data = EventData(kind="made_way", choice="client" if victim.client != needy.client else "batch")
    return _preemption_event(victim, record, data, now_ns, needy)


def preempted_by(victim: Request, by: str, record: PreemptionRecord, now_ns: int) -> Event:
    return _preemption_event(victim, record, EventData(kind="asked", by=by), now_ns)


def restarted(victim: Request, why: str, record: PreemptionRecord, now_ns: int) -> Event:
    """Return the event of a restart: a step failed for the reason `why`, and the recurrent state must be recomputed."""
    return _preemption_event(victim, record, EventData(kind="restarted", why=why), now_ns)


def _preemption_event(
    victim: Request, record: PreemptionRecord, why: EventData, now_ns: int, needy: Request | None = None
) -> Event:
    data = replace(
        why,
        is_swapped=record.is_swapped,
        num_states=int(record.has_state),
        swap_ns=_nanoseconds(record.swap_seconds),
        recompute_ns=_nanoseconds(record.recompute_seconds),
    )
    return with_cause(
        Event(
            kind="preempted",
            time_ns=now_ns,
            number=victim.number,
            other=0 if needy is None else needy.number,
            num_blocks=record.num_blocks,
            num_tokens=record.num_tokens,
            data=data,
        )
    )


def evicted_by(count: int, num_offloaded: int, by: str, now_ns: int) -> Event:
    """Return the event of an eviction that user `by` asked for; `num_offloaded` blocks were copied to host memory."""
    order = f"{num_offloaded} of them moved to host memory" if num_offloaded else ""
    cause = evicted_text(f"requested by {by}", [(count, "cached block")], order=order)
    return Event(kind="evicted", time_ns=now_ns, num_blocks=count, cause=cause)


def finished(request: Request, now_ns: int, num_blocks: int) -> Event:
    cause = finished_text(
        str(request.finish_reason),
        len(request.output_token_ids),
        num_blocks,
        max_tokens=request.max_tokens,
        num_draft_tokens=request.num_draft_tokens,
        num_accepted_tokens=request.num_accepted_tokens,
    )
    return Event(
        kind="finished",
        time_ns=now_ns,
        number=request.number,
        cause=cause,
        num_blocks=num_blocks,
        num_tokens=len(request.output_token_ids),
        data=EventData(kind="ended", finish_reason=str(request.finish_reason)),
    )


def aborted(request: Request, now_ns: int, num_blocks: int, cause: str) -> Event:
    generated = len(request.output_token_ids)
    return Event(
        kind="aborted",
        time_ns=now_ns,
        number=request.number,
        cause=aborted_text(cause, generated, num_blocks),
        num_blocks=num_blocks,
        num_tokens=generated,
    )


def refused(number: int, now_ns: int, cause: str) -> Event:
    """Return the event of a refused request; `number` is 0 if the request was not numbered yet."""
    return Event(kind="refused", time_ns=now_ns, number=number, cause=cause)


def evicted(count: int, num_offloaded: int, needy: int, now_ns: int) -> Event:
    """Return the event of `count` cached blocks evicted in a step, `num_offloaded` of which were copied to host memory.

    The first of them was evicted for request `needy`.
    """
    data = EventData(kind="evicted", num_offloaded=num_offloaded)
    return with_cause(Event(kind="evicted", time_ns=now_ns, other=needy, num_blocks=count, data=data))


def with_loaded_state(event: Event) -> Event:
    """Return a copy of an admission event that adds that the recurrent state was loaded from host memory."""
    assert event.data is not None, "an admission has data"
    return with_cause(replace(event, data=replace(event.data, num_loaded_states=1)))


def states_evicted(needy: Sequence[int], num_offloaded: int, now_ns: int) -> Event:
    """Return the event of evicted recurrent states, `num_offloaded` of which were copied to host memory.

    `needy` has, for each evicted state, the number of the request that got its slot.
    """
    data = EventData(kind="states_evicted", num_states=len(needy), num_offloaded=num_offloaded)
    return with_cause(Event(kind="evicted", time_ns=now_ns, other=needy[0], data=data))


def disk_failed(reason: str, now_ns: int) -> Event:
    return Event(kind="note", time_ns=now_ns, cause=f"the disk tier is off from now on: {reason}")


def cache_reset(count: int, now_ns: int) -> Event:
    return Event(kind="note", time_ns=now_ns, cause=emptied_text("the prefix cache", count), num_blocks=count)


def _nanoseconds(seconds: float | None) -> int:
    return -1 if seconds is None else round(seconds * 1e9)
