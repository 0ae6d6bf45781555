"""What happened to a request, and why: events with what a person is told of them.

Owns which data an event carries. The words are made of them in `event_kinds`, and sent along for older readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from kvscope_engine.policy.prefixes.prefix_history import Miss
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.preemption import GivenUp
from kvscope_engine.policy.scheduling.reuse import Reusable
from kvscope_telemetry.messages.event_kinds import aborted_text, emptied_text, evicted_text, finished_text, with_cause
from kvscope_telemetry.messages.telemetry import Event, EventData
from kvscope_telemetry.running_time import RunningTime


class Blocks(NamedTuple):
    """What a request's tokens take, and what is set aside for it at once (0: what they take)."""

    num_needed: int
    num_set_aside: int = 0


def admitted(
    request: Request,
    now_ns: int,
    found: Reusable,
    num_reused: int,
    blocks: Blocks,
    missed: Miss,
    running_time: RunningTime,
) -> Event:
    """The request got its place: `blocks` for all it knows, `num_reused` tokens of it not to be computed.

    `found` is what there seemed to be, `missed` why it was not more.
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
        missed=missed.kind,
        missed_token=missed.token,
        missed_step=missed.step,
        num_set_aside=blocks.num_set_aside,
        num_states=int(request.state_slot >= 0 and num_reused > 0),
    )
    kind = "resumed" if returns else "admitted"
    event = Event(
        kind=kind, time_ns=now_ns, number=request.number, num_blocks=blocks.num_needed, num_tokens=num_reused, data=data
    )
    return with_cause(event)


def forked(parent: Request, child: Request, now_ns: int, running_time: RunningTime) -> Event:
    """The child runs on its parent's blocks."""
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


def preempted(victim: Request, needy: Request, needed: int, available: int, given_up: GivenUp, now_ns: int) -> Event:
    """`needy` needed blocks that were not there, and the victim gave up its own."""
    choice, choice_number = _choice(victim, needy)
    data = EventData(
        kind="preempted", num_needed=needed, num_available=available, choice=choice, choice_number=choice_number
    )
    return _gave_up(victim, given_up, data, now_ns, needy)


def made_way(victim: Request, needy: Request, given_up: GivenUp, now_ns: int) -> Event:
    """`needy` is of a client, or a batch, that ran nothing, and the victim of one that runs several requests."""
    data = EventData(kind="made_way", choice="client" if victim.client != needy.client else "batch")
    return _gave_up(victim, given_up, data, now_ns, needy)


def preempted_by(victim: Request, by: str, given_up: GivenUp, now_ns: int) -> Event:
    """`by` asked for it, and the victim gave up its blocks."""
    return _gave_up(victim, given_up, EventData(kind="asked", by=by), now_ns)


def restarted(victim: Request, why: str, given_up: GivenUp, now_ns: int) -> Event:
    """A step failed for `why`, and the victim is to be computed again with a state that is whole."""
    return _gave_up(victim, given_up, EventData(kind="restarted", why=why), now_ns)


def _gave_up(victim: Request, given_up: GivenUp, why: EventData, now_ns: int, needy: Request | None = None) -> Event:
    """A preemption, with what became of the victim's blocks added to why it was."""
    data = replace(
        why,
        is_swapped=given_up.is_swapped,
        num_states=int(given_up.has_state),
        swap_ns=_ns(given_up.swap_seconds),
        recompute_ns=_ns(given_up.recompute_seconds),
    )
    return with_cause(
        Event(
            kind="preempted",
            time_ns=now_ns,
            number=victim.number,
            other=0 if needy is None else needy.number,
            num_blocks=given_up.num_blocks,
            num_tokens=given_up.num_tokens,
            data=data,
        )
    )


def evicted_by(count: int, num_offloaded: int, by: str, now_ns: int) -> Event:
    """`by` had cached blocks dropped; `num_offloaded` went to a lower tier."""
    order = f"{num_offloaded} of them moved to host memory" if num_offloaded else ""
    cause = evicted_text(f"requested by {by}", [(count, "cached block")], order=order)
    return Event(kind="evicted", time_ns=now_ns, num_blocks=count, cause=cause)


def finished(request: Request, now_ns: int, num_blocks: int) -> Event:
    """The request ended by itself. `num_blocks` were released."""
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
    """The request was stopped from outside. `num_blocks` were released."""
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
    """A request was not taken; `number` is 0 when it did not get one."""
    return Event(kind="refused", time_ns=now_ns, number=number, cause=cause)


def evicted(count: int, num_offloaded: int, needy: int, now_ns: int) -> Event:
    """Cached blocks were given away in a step, the first to request `needy`; `num_offloaded` went to a lower tier."""
    data = EventData(kind="evicted", num_offloaded=num_offloaded)
    return with_cause(Event(kind="evicted", time_ns=now_ns, other=needy, num_blocks=count, data=data))


def with_loaded_state(event: Event) -> Event:
    """The same, of a request whose recurrent layers go on from a state that was in host memory."""
    assert event.data is not None, "an admission has data"
    return with_cause(replace(event, data=replace(event.data, num_loaded_states=1)))


def states_evicted(needy: Sequence[int], num_offloaded: int, now_ns: int) -> Event:
    """Slots of kept states of recurrent layers were given away, one to each of the requests `needy`; `num_offloaded`
    of the states went to host memory."""
    data = EventData(kind="states_evicted", num_states=len(needy), num_offloaded=num_offloaded)
    return with_cause(Event(kind="evicted", time_ns=now_ns, other=needy[0], data=data))


def disk_failed(reason: str, now_ns: int) -> Event:
    """The disk tier is not written any more."""
    return Event(kind="note", time_ns=now_ns, cause=f"the disk tier is off from now on: {reason}")


def cache_reset(count: int, now_ns: int) -> Event:
    """The prefix cache was emptied."""
    return Event(kind="note", time_ns=now_ns, cause=emptied_text("the prefix cache", count), num_blocks=count)


def _choice(victim: Request, needy: Request) -> tuple[str, int]:
    """`EventData.choice` and its number."""
    if victim is needy:
        return "itself", 0
    if victim.priority < needy.priority:
        return "priority", victim.priority
    if victim.client != needy.client:
        return "share", 0
    if victim.num_preemptions < needy.num_preemptions:
        return "spared", victim.num_preemptions
    return "newest", 0


def _ns(seconds: float | None) -> int:
    return -1 if seconds is None else round(seconds * 1e9)
