"""Hit tests on the timeline: describe the item at a point, with its request or event. Imports no Qt widgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvscope_app.session.mark_labels import mark_text
from kvscope_app.session.stop_bands import stop_text_at
from kvscope_app.ui.clock_text import clock_text
from kvscope_app.ui.number_text import UNKNOWN, count, percent, plural, seconds
from kvscope_app.views.events.event_entries import why_text
from kvscope_app.views.timeline.lane_colors import PHASE_TEXTS
from kvscope_app.views.timeline.lane_layout import MARKS, PAUSED, STEPS, TICK_LANES
from kvscope_app.views.timeline.lane_picture import ShownLanes, event_times, gaps, usage_shares
from kvscope_app.views.timeline.request_lanes import OPEN_NS
from kvscope_app.views.timeline.steps import StepColumns
from kvscope_telemetry.messages.event_kinds import kind_text
from kvscope_telemetry.request_phase import RequestPhase
from kvscope_telemetry.summaries.event_index import EventIndex
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, TimedEvent

_MAX_EVENTS_SHOWN: Final = 3
STEP_MARGIN_NS: Final = 1_000
"""Nanoseconds added to a step's end when the cursor moves there. Without them, rounding to float seconds could
put the cursor before the step's end.
"""
_STEP_COLUMNS: Final = ("num_steps", "prefill_tokens", "decode_tokens")


@dataclass(frozen=True, slots=True)
class LaneHit:
    """Result of a hit test: the item at a point of the lanes, as text, and its request. `number` 0 means no request."""

    time_ns: int
    text: str = ""
    epoch: int = 0
    number: int = 0
    batch: tuple[int, ...] = ()
    """Numbers of the requests in the step that was hit."""
    event: TimedEvent | None = None


def hit_lane(name: str, shown: ShownLanes, time_ns: int, reach_ns: int) -> LaneHit:
    """Return the item of lane `name` (a lane above the requests) at `time_ns` or, if there is none, the nearest item
    within `reach_ns`.
    """
    overview = shown.overview
    index = overview.index_at(time_ns)
    is_known = index >= 0 and time_ns - int(overview.time_ns[index]) < SECOND_NS
    if name in ("usage", "running", "waiting"):
        return LaneHit(time_ns, _state_text(overview, index) if is_known else "no data for this second")
    if name == STEPS:
        return _hit_step_lane(shown, time_ns, reach_ns, index if is_known else -1)
    if name == MARKS:
        mark = shown.marks.nearest(time_ns, reach_ns)
        return LaneHit(time_ns) if mark is None else LaneHit(mark.time_ns, mark_text(mark))
    if name == PAUSED:
        text = stop_text_at(overview, time_ns)
        return LaneHit(time_ns, f"Engine {text}" if text else "")
    if name == "gaps":
        return LaneHit(time_ns, _gap_text(overview, time_ns, reach_ns))
    nearby = _nearby_events(name, shown, time_ns, reach_ns)
    if nearby:
        nearest = min(nearby, key=lambda timed: abs(timed.time_ns - time_ns))
        text = _events_text(nearby, nearest)
        return LaneHit(nearest.time_ns, text, nearest.epoch, nearest.event.number, event=nearest)
    lane = TICK_LANES[name]
    number = int(np.nan_to_num(overview.column(lane.column)[index])) if is_known and lane.column else 0
    return LaneHit(time_ns, f"{plural(number, lane.noun)} in this second" if number else "")


def _hit_step_lane(shown: ShownLanes, time_ns: int, reach_ns: int, second: int) -> LaneHit:
    steps = shown.steps
    index = None if steps is None else steps.index_at(time_ns, reach_ns)
    if steps is None or index is None:
        if second < 0:
            return LaneHit(time_ns, "no data for this second")
        counts = {name: float(shown.overview.column(name)[second]) for name in _STEP_COLUMNS}
        numbers = {name: int(np.nan_to_num(value)) for name, value in counts.items()}
        tokens = f"{count(numbers['prefill_tokens'])} prefill and {count(numbers['decode_tokens'])} decode tokens"
        if np.isnan(counts["num_steps"]):
            return LaneHit(time_ns, f"in this second: {tokens}")
        return LaneHit(time_ns, f"{plural(numbers['num_steps'], 'step')} in this second: {tokens}")
    return step_hit(steps, index)


def step_hit(steps: StepColumns, index: int) -> LaneHit:
    """Return the hit for the step at `index`. The hit's time is just after the step's end, so that the cursor
    moves to the state after the step.
    """
    batch, duration_s = steps.batch(index), float(steps.end_ns[index] - steps.begin_ns[index]) / 1e9
    text = (
        f"Step {count(int(steps.step[index]))}: {plural(batch.numbers.size, 'request')}, "
        f"{count(int(steps.prefill[index]))} prefill and {count(int(steps.decode[index]))} decode tokens, "
        f"{seconds(duration_s)}"
    )
    time_ns = int(steps.end_ns[index]) + STEP_MARGIN_NS
    return LaneHit(time_ns, text, int(steps.epoch[index]), 0, tuple(batch.numbers.tolist()))


def hit_row(row: int, shown: ShownLanes, time_ns: int, reach_ns: int) -> LaneHit:
    """Return the hit for the request phase in request row `row` at `time_ns`, or for the nearest phase within
    `reach_ns`.
    """
    spans = shown.lanes.spans
    ends = np.where(spans["end"] == OPEN_NS, max(shown.until_ns, time_ns), spans["end"])
    is_near = (spans["begin"] <= time_ns + reach_ns) & (ends >= time_ns - reach_ns)
    indices = np.flatnonzero((shown.rows[spans["request"]] == row) & is_near)
    if not indices.size:
        return LaneHit(time_ns)
    distances = np.maximum(spans["begin"][indices] - time_ns, time_ns - ends[indices]).clip(0)
    index = int(indices[np.lexsort((-spans["phase"][indices].astype(np.int64), distances))[0]])
    return _span_hit(index, shown, time_ns)


def _span_hit(index: int, shown: ShownLanes, time_ns: int) -> LaneHit:
    spans, requests = shown.lanes.spans, shown.lanes.requests
    request, phase = int(spans["request"][index]), RequestPhase(int(spans["phase"][index]))
    number, epoch = int(requests["number"][request]), int(requests["epoch"][request])
    begin_ns, end_ns = int(spans["begin"][index]), int(spans["end"][index])
    stops, until_ns = shown.overview.stops, min(end_ns, shown.until_ns)
    running_ns = stops.running_ns(begin_ns, until_ns)
    duration_text = "" if phase >= RequestPhase.ABORTED else f" for {seconds(running_ns / 1e9)}"
    if stopped_ns := stops.stopped_ns(begin_ns, until_ns):
        duration_text += f" (without {seconds(stopped_ns / 1e9)} {stops.stopped_text((begin_ns, until_ns))})"
    open_text = " so far" if end_ns == OPEN_NS else ""
    adapter = shown.adapter_of(epoch, number)
    request_text = f"#{count(number)} ({adapter})" if adapter else f"#{count(number)}"
    text = f"{request_text} {PHASE_TEXTS[phase]}{duration_text}{open_text}"
    # the event at the end of waiting states the cause
    at_ns = end_ns if phase is RequestPhase.QUEUED and end_ns != OPEN_NS else begin_ns
    causes = shown.overview.events.find(at_ns, at_ns, request=(epoch, number))
    timed_causes = (shown.overview.events[index] for index in causes)
    reasons = [why_text(timed.event) for timed in timed_causes if _is_event_of(timed, number)]
    clamped_ns = min(max(time_ns, begin_ns), end_ns)
    return LaneHit(clamped_ns, ": ".join([text, *reasons[:1]]), epoch, number)


def _is_event_of(timed: TimedEvent, number: int) -> bool:
    return timed.event.number == number and timed.event.kind != "note"


def _nearby_events(name: str, shown: ShownLanes, time_ns: int, reach_ns: int) -> list[TimedEvent]:
    lane = TICK_LANES.get(name)
    if lane is None or not lane.kind:
        return []
    events: EventIndex = shown.overview.events
    first_ns, last_ns = time_ns - reach_ns, time_ns + reach_ns
    if name == "swapped":
        times = event_times(name, shown)
        if np.searchsorted(times, first_ns, "left") == np.searchsorted(times, last_ns, "right"):
            return []
    nearby = [events[index] for index in events.find(first_ns, last_ns, (lane.kind,)).tolist()]
    return [timed for timed in nearby if name != "swapped" or (timed.event.data and timed.event.data.is_swapped)]


def _events_text(nearby: list[TimedEvent], nearest: TimedEvent) -> str:
    in_order = sorted(nearby, key=lambda timed: abs(timed.time_ns - nearest.time_ns))
    lines = [_event_text(timed) for timed in in_order[:_MAX_EVENTS_SHOWN]]
    num_more = len(nearby) - len(lines)
    return "\n".join([*lines, f"and {count(num_more)} more here: zoom in"] if num_more > 0 else lines)


def _event_text(timed: TimedEvent) -> str:
    event = timed.event
    request_text = f" #{count(event.number)}" if event.number else ""
    reason = why_text(event)
    return f"{clock_text(timed.time_ns)} {kind_text(event.kind)}{request_text}" + (f": {reason}" if reason else "")


def _state_text(overview: SessionOverview, index: int) -> str:
    states = ("active_blocks", "cached_blocks", "free_blocks")
    block_counts = {name: float(overview.column(name)[index]) for name in states}
    active, _ = usage_shares(overview)
    num_running, num_waiting = (int(overview.column(f"num_{name}")[index]) for name in ("running", "waiting"))
    load = f"{count(num_running)} running, {count(num_waiting)} waiting"
    if np.isnan([*block_counts.values()]).any():
        in_use = percent(float(active[index])) if np.isfinite(active[index]) else UNKNOWN
        return f"in use: {in_use}, {count(np.nan_to_num(block_counts['cached_blocks']))} keep a prefix · {load}"
    return (
        f"{percent(float(active[index]))} in use: {plural(int(block_counts['active_blocks']), 'block')} active, "
        f"{count(block_counts['cached_blocks'])} cached, {count(block_counts['free_blocks'])} free · {load}"
    )


def _gap_text(overview: SessionOverview, time_ns: int, reach_ns: int) -> str:
    for begin_ns, end_ns in zip(*(times.tolist() for times in gaps(overview)), strict=True):
        if begin_ns - reach_ns <= time_ns <= end_ns + reach_ns:
            return f"no telemetry was received for {seconds((end_ns - begin_ns) / 1e9)}"
    is_near = np.flatnonzero(
        (overview.column("num_lost_frames") > 0) & (np.abs(overview.time_ns - time_ns) <= SECOND_NS + reach_ns)
    )
    num_lost = int(overview.column("num_lost_frames")[is_near].sum())
    return f"{plural(num_lost, 'frame')} lost here" if num_lost else ""
