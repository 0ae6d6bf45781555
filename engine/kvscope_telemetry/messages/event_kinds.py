"""The kinds of events in an engine, and the texts of their causes, such as why a request was preempted.

Each kind is one `EventKind` in `EVENT_KINDS`, which determines its text, its color, its mark on the timeline and the
exports that include it.

An event without data, or with data of an unknown kind, keeps the text with which it was sent. `finished_text` and the
functions after it compose those texts, for kvscope's own engine and for engines with kvscope's plugin. Must not depend
on an engine or a widget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from kvscope_telemetry.messages.telemetry import Event, EventData
from kvscope_telemetry.plural import counted

CauseClauses = Callable[[Event, EventData], list[str]]
"""Function that returns the clauses of an event's cause as text."""


@dataclass(frozen=True, slots=True)
class EventLane:
    """Lane of the timeline with a mark for each event of one kind."""

    color: str
    """Name of a theme color."""
    column: str = ""
    """Column of the session overview with the number of events per second, which is shown for time ranges
    without individual events; empty if the events are not counted.
    """
    counted: str = ""
    """Singular noun for what `column` counts; empty if `EventKind.noun` is the right noun."""


@dataclass(frozen=True, slots=True)
class EventKind:
    name: str
    """Name on the wire, in recordings and in exports. It must never change."""
    color: str
    """Theme color of the kind's name in lists."""
    noun: str = ""
    """Noun for counts and searches, in the singular. The plural has an s appended."""
    cause_functions: Mapping[str, CauseClauses] = field(default_factory=dict)
    """Functions that describe the cause of an event, by `EventData.kind`."""
    lane: EventLane | None = None
    is_stop: bool = False
    """Whether the event marks the start or end of a pause or suspension (`RunningTime.record`)."""
    is_stepped: bool = False
    """Whether the user can step through time from one event to the next."""
    is_first_named: bool = False
    """Whether the first event of this kind in a run can be used to align two runs in time."""
    is_reported: bool = True
    """Whether a report lists the events of this kind individually."""
    is_traced: bool = True
    """Whether a trace includes the event in its track of events. Otherwise, the phases of the event's request show it.
    """

    @property
    def text(self) -> str:
        return kind_text(self.name)

    @property
    def plural(self) -> str:
        return f"{self.noun}s"


def cause_text(event: Event) -> str:
    data, kind = event.data, BY_NAME.get(event.kind)
    clauses_of = None if data is None or kind is None else kind.cause_functions.get(data.kind)
    return event.cause if data is None or clauses_of is None else "; ".join(clauses_of(event, data))


def with_cause(event: Event) -> Event:
    """Return the event with its cause as text, composed from its data, for readers that do not support this
    kind of data.
    """
    return replace(event, cause=cause_text(event))


def kind_text(name: str) -> str:
    """Return the label of a kind of event in tables, such as "engine paused"."""
    return name.replace("_", " ")


def finished_text(
    reason: str,
    num_tokens: int,
    num_blocks: int,
    *,
    max_tokens: int = 0,
    num_draft_tokens: int = 0,
    num_accepted_tokens: int = 0,
) -> str:
    """Return why a request ended without being aborted.

    Args:
        reason: A finish reason ("stop", "length", "error", "too_long", "repetition"), or any other clause.
        max_tokens: The request's limit; 0 if unknown.
    """
    limit = counted(max_tokens, "new token") if max_tokens else "new tokens"
    ending = {
        "stop": "stopped",
        "length": f"reached its limit of {limit}",
        "error": "ended by an error",
        "too_long": "longer than the model's context",
        "repetition": "stopped for repeating itself",
    }.get(reason, reason)
    drafts = f", {num_accepted_tokens} of {num_draft_tokens} draft tokens accepted" if num_draft_tokens else ""
    return f"{ending} after {counted(num_tokens, 'token')}{drafts}; {counted(num_blocks, 'block')} released"


def aborted_text(why: str, num_tokens: int, num_blocks: int) -> str:
    """Return why a request was aborted, with the numbers of tokens generated and blocks released."""
    tokens = f"{counted(num_tokens, 'token')} {_was_or_were(num_tokens)} generated"
    return f"{why}; {tokens}, {counted(num_blocks, 'block')} released"


def evicted_text(why: str, evicted: Sequence[tuple[int, str]], *, number: int = 0, order: str = "") -> str:
    """Return the cause of an eviction as text.

    Args:
        evicted: Counts with their nouns.
        number: The request that needed the space; 0 if unknown.
        order: Clause that describes how the victims were chosen.
    """
    parts = [counted(count, noun) for count, noun in evicted if count]
    beneficiary = f" for request #{number}" if number else ""
    choice = f", {order}" if order else ""
    return (
        f"{why}; {' and '.join(parts)} {_was_or_were(sum(count for count, _ in evicted))} evicted{beneficiary}{choice}"
    )


def displaced_text(num_blocks: int, number: int) -> str:
    """Return the cause of evictions from host memory that make space for blocks of request `number`."""
    was = _was_or_were(num_blocks)
    return (
        f"{counted(num_blocks, 'block')} {was} evicted from host memory, where blocks of request #{number} are kept now"
    )


def emptied_text(place: str, num_blocks: int, num_states: int = 0) -> str:
    """Return the cause of an event in which all cached blocks of `place`, such as "the prefix cache", were dropped."""
    states = f" and {counted(num_states, 'cached state')}" if num_states else ""
    return f"{place} was emptied: {counted(num_blocks, 'cached block')}{states}"


def retracted_text(
    number: int,
    choice: str,
    choice_number: int,
    *,
    other: int,
    num_tokens: int,
    num_blocks: int,
    num_free_tokens: int,
) -> str:
    """Return why request `number` was preempted, for an engine such as SGLang that checks before each step whether all
    running requests together fit.

    Args:
        choice: As in `EventData.choice`, or "fewest" (it had generated the fewest tokens).
        other: The first request that lacked blocks; 0 if unknown.
    """
    first = f", request #{other} first" if other else ""
    return (
        f"the running requests needed more blocks than were free or could be evicted{first}; "
        f"{choice_text(number, choice, choice_number)}; {counted(num_tokens, 'token')} in "
        f"{counted(num_blocks, 'block')} released; {counted(num_free_tokens, 'token')} free now"
    )


def reuse_clauses(data: EventData) -> list[str]:
    """Return clauses about blocks loaded from lower tiers, and tokens that could not be read back."""
    parts = []
    loaded = [counted(data.num_loaded_blocks, "block")] if data.num_loaded_blocks else []
    loaded += ["the recurrent state"] if data.num_loaded_states else []
    if loaded:
        parts.append(f"{' and '.join(loaded)} loaded from lower tiers")
    if data.num_lost_tokens:
        parts.append(f"{data.num_lost_tokens} tokens could not be read back completely and are recomputed")
    return parts


def miss_text(data: EventData) -> str:
    """Return why the prefix hit was not longer; empty if nothing was missed or the reason is unknown."""
    return {
        "evicted": f"the block from token {data.missed_token} was evicted at step {data.missed_step}",
        "differs": f"it first differs from what is cached at token {data.missed_token}",
        "unseen": f"no cached prefix continues after token {data.missed_token}",
        "new": "no cached prefix matches",
        "salt": "its text is cached under another cache salt",
        "state": f"no state of the recurrent layers was kept on the way to token {data.missed_token}",
        "adapter": "its text is cached under another LoRA adapter",
    }.get(data.missed, "")


def _started(event: Event, data: EventData) -> list[str]:
    waited = _time(data.waited_ns)
    stopped = f" (without {_time(data.stopped_ns)} paused or suspended)" if data.stopped_ns else ""
    parts = [f"resumed {waited} after its preemption" if event.kind == "resumed" else f"waited {waited}"]
    parts[0] += stopped
    parts.append(_blocks_clause(event, data))
    if data.num_pool_blocks or data.num_loaded_blocks:
        known = f"{event.num_tokens} of {data.num_known_tokens} tokens were there already"
        is_state_there = data.num_states and not data.num_loaded_states
        state = " and the recurrent state after them" if is_state_there else ""
        parts.append(f"{known}, {counted(data.num_pool_blocks, 'block')} in the pool{state}")
    else:
        parts.append(f"all {data.num_known_tokens} tokens to compute")
    missed = miss_text(data)
    return [*parts, *reuse_clauses(data), *([f"not more, since {missed}"] if missed else [])]


def _blocks_clause(event: Event, data: EventData) -> str:
    if not data.num_set_aside:
        return f"{counted(event.num_blocks, 'block')} needed"
    run = f"a run of {counted(data.num_set_aside, 'block')} reserved for it"
    return f"{run}, {event.num_blocks} of them filled"


def _forked(event: Event, _: EventData) -> list[str]:
    shared = f"shares its {counted(event.num_blocks, 'block')} until one of them writes"
    return [f"forked from request #{event.other}", shared]


def _preempted(event: Event, data: EventData) -> list[str]:
    available = {0: "none was", 1: "only 1 was"}.get(
        data.num_available, f"only {data.num_available} were"
    ) + " available"
    blocks = counted(data.num_needed, "block") if data.num_needed else "more blocks"
    needed = f"request #{event.other} needed {blocks} and {available}"
    return [needed, choice_text(event.number, data.choice, data.choice_number), _cost_clause(event, data)]


def _made_way(event: Event, data: EventData) -> list[str]:
    reason = {"client": "its client had no running request", "batch": "its batch had no running request"}.get(
        data.choice, "it was its turn"
    )
    return [f"to let request #{event.other} start ({reason})", _cost_clause(event, data)]


def _asked(event: Event, data: EventData) -> list[str]:
    return [f"requested by {data.by}", _cost_clause(event, data)]


def _restarted(event: Event, data: EventData) -> list[str]:
    return [f"{data.why}, which spoilt its recurrent state", _cost_clause(event, data)]


def choice_text(number: int, choice: str, choice_number: int) -> str:
    """Return why request `number` was chosen to be preempted."""
    chosen = f"request #{number} was chosen"
    times = {0: "never preempted", 1: "preempted only once"}.get(choice_number, f"preempted only {choice_number} times")
    return {
        "itself": "it was itself the next to be preempted",
        "priority": f"{chosen}, having the lowest priority ({choice_number})",
        "spared": f"{chosen}: it was {times}",
        "share": f"{chosen}: its client held the most tokens",
        "newest": f"{chosen}, being the newest",
        "fewest": f"{chosen}, having generated the fewest tokens ({choice_number})",
    }.get(choice, chosen)


def _cost_clause(event: Event, data: EventData) -> str:
    """Return what a preemption dropped or swapped, with the measured costs if known."""
    state = " and a recurrent state" if data.num_states else ""
    freed = f"{counted(event.num_tokens, 'token')} in {counted(event.num_blocks, 'block')}{state}"
    swap, recompute = _about_time(data.swap_ns), _about_time(data.recompute_ns)
    if data.is_swapped:
        comparison = f", {recompute} to recompute" if recompute else ""
        return f"{freed} swapped to a lower tier ({swap} round trip{comparison})"
    parts = [part for part in (recompute, f"{swap} by a lower tier" if swap else "") if part]
    return f"{freed} to recompute" + (f" ({', '.join(parts)})" if parts else "")


def _evicted(event: Event, data: EventData) -> list[str]:
    return ["no block was free", *_least_recently_used("block", event.num_blocks, event, data)]


def _states_evicted(event: Event, data: EventData) -> list[str]:
    return ["no slot for a recurrent state was free", *_least_recently_used("state", data.num_states, event, data)]


def _least_recently_used(noun: str, count: int, event: Event, data: EventData) -> list[str]:
    if count == 1:
        chosen = f"the least recently used cached {noun} was evicted for request #{event.other}"
    else:
        chosen = f"the {count} least recently used cached {noun}s were evicted, first for request #{event.other}"
    return [chosen, *([f"{data.num_offloaded} moved to host memory"] if data.num_offloaded else [])]


def _paused(_: Event, data: EventData) -> list[str]:
    return [f"paused by {data.by}" if data.by else "paused"]


def _resumed(_: Event, data: EventData) -> list[str]:
    by = f" by {data.by}" if data.by else ""
    return [f"it was paused{by} for {_time(data.lasted_ns)}", *([data.why] if data.why else [])]


def _single_step(_: Event, data: EventData) -> list[str]:
    return [f"requested by {data.by}" if data.by else "requested", f"it took {_time(data.lasted_ns)}"]


def _suspended(_: Event, data: EventData) -> list[str]:
    slept = [f"the machine slept for {_time(data.slept_ns)}"] if data.slept_ns else []
    return [f"the process was suspended for {_time(data.lasted_ns)}", *slept]


def _was_or_were(count: int) -> str:
    return "was" if count == 1 else "were"


def _about_time(duration_ns: int) -> str:
    return "" if duration_ns < 0 else f"about {_time(duration_ns)}"


def _time(duration_ns: int) -> str:
    return f"{duration_ns / 1e9:.1f} s" if duration_ns >= 1_000_000_000 else f"{duration_ns / 1e6:.1f} ms"


EVENT_KINDS: Final = (
    EventKind(
        "admitted",
        "accent",
        "request",
        {"started": _started, "forked": _forked},
        is_first_named=True,
        is_reported=False,
        is_traced=False,
    ),
    EventKind(
        "preempted",
        "bad",
        "preemption",
        {"preempted": _preempted, "made_way": _made_way, "asked": _asked, "restarted": _restarted},
        EventLane("bad", "preemptions", "preemption"),
        is_stepped=True,
        is_first_named=True,
        is_traced=False,
    ),
    EventKind("resumed", "accent", cause_functions={"started": _started}, is_reported=False, is_traced=False),
    EventKind(
        "evicted",
        "muted",
        "eviction",
        {"evicted": _evicted, "states_evicted": _states_evicted},
        EventLane("flash_evicted", "evicted_blocks", "evicted block"),
        is_stepped=True,
        is_first_named=True,
        is_reported=False,
    ),
    EventKind(
        "refused",
        "bad",
        "refusal",
        lane=EventLane("bad", "refused", "refusal"),
        is_stepped=True,
        is_first_named=True,
    ),
    EventKind("finished", "good", "request completion", is_stepped=True, is_reported=False, is_traced=False),
    EventKind("aborted", "warn", is_traced=False),
    EventKind("note", "muted"),
    EventKind("engine_paused", "warn", cause_functions={"engine_paused": _paused}, is_stop=True),
    EventKind("engine_resumed", "good", cause_functions={"engine_resumed": _resumed}, is_stop=True),
    EventKind("single_step", "accent", cause_functions={"single_step": _single_step}, is_stop=True),
    EventKind("process_suspended", "warn", cause_functions={"process_suspended": _suspended}, is_stop=True),
)
"""All kinds of events, in the order of menus and lanes."""
BY_NAME: Final = {kind.name: kind for kind in EVENT_KINDS}
KIND_NAMES: Final = tuple(BY_NAME)
KIND_CODES: Final = {name: code for code, name in enumerate(KIND_NAMES)}
"""Index of each kind, for numeric columns. Valid within one process only."""
STOP_KINDS: Final = tuple(kind.name for kind in EVENT_KINDS if kind.is_stop)
