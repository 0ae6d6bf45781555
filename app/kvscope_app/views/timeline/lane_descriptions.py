"""Describes what is under a point of the timeline, and which request or event it belongs to. Imports no widget."""

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
from kvscope_app.views.timeline.lane_picture import ShownLanes, gaps, moments_of, usage_shares
from kvscope_app.views.timeline.request_lanes import OPEN_NS
from kvscope_app.views.timeline.steps import StepColumns
from kvscope_telemetry.messages.event_kinds import kind_text
from kvscope_telemetry.request_phase import RequestPhase
from kvscope_telemetry.summaries.event_index import EventIndex
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, TimedEvent

_MAX_NAMED: Final = 3
STEP_MARGIN_NS: Final = 1_000
"""Offset added to a step's end when going to it: times that pass through float seconds then still reach the step."""
_TOKENS: Final = ("num_steps", "prefill_tokens", "decode_tokens")


@dataclass(frozen=True, slots=True)
class LaneHit:
    """Result of a hit test at a point of the lanes. `number` 0: no request."""

    time_ns: int
    text: str = ""
    epoch: int = 0
    number: int = 0
    batch: tuple[int, ...] = ()
    """Requests of the step that was hit."""
    event: TimedEvent | None = None
    """Event whose mark was hit."""


def hit_lane(name: str, shown: ShownLanes, time_ns: int, reach_ns: int) -> LaneHit:
    """Return what lane `name` (one above the requests) shows at `time_ns`, or nearby within `reach_ns`."""
    overview = shown.overview
    index = overview.index_at(time_ns)
    is_known = index >= 0 and time_ns - int(overview.time_ns[index]) < SECOND_NS
    if name in ("usage", "running", "waiting"):
        return LaneHit(time_ns, _state_text(overview, index) if is_known else "no data for this second")
    if name == STEPS:
        return _hit_step_lane(shown, time_ns, reach_ns, index if is_known else -1)
    if name == MARKS:
        mark = shown.marks.near(time_ns, reach_ns)
        return LaneHit(time_ns) if mark is None else LaneHit(mark.time_ns, mark_text(mark))
    if name == PAUSED:
        words = stop_text_at(overview, time_ns)
        return LaneHit(time_ns, f"Engine {words}" if words else "")
    if name == "gaps":
        return LaneHit(time_ns, _gap_text(overview, time_ns, reach_ns))
    near = _near(name, shown, time_ns, reach_ns)
    if near:
        nearest = min(near, key=lambda timed: abs(timed.time_ns - time_ns))
        words = _events_text(near, nearest)
        return LaneHit(nearest.time_ns, words, nearest.epoch, nearest.event.number, event=nearest)
    lane = TICK_LANES[name]
    number = int(np.nan_to_num(overview.column(lane.column)[index])) if is_known and lane.column else 0
    return LaneHit(time_ns, f"{plural(number, lane.counted)} in this second" if number else "")


def _hit_step_lane(shown: ShownLanes, time_ns: int, reach_ns: int, second: int) -> LaneHit:
    steps = shown.steps
    index = None if steps is None else steps.index_at(time_ns, reach_ns)
    if steps is None or index is None:
        if second < 0:
            return LaneHit(time_ns, "no data for this second")
        counts = {name: float(shown.overview.column(name)[second]) for name in _TOKENS}
        numbers = {name: int(np.nan_to_num(value)) for name, value in counts.items()}
        tokens = f"{count(numbers['prefill_tokens'])} prefill and {count(numbers['decode_tokens'])} decode tokens"
        if np.isnan(counts["num_steps"]):
            return LaneHit(time_ns, f"in this second: {tokens}")
        return LaneHit(time_ns, f"{plural(numbers['num_steps'], 'step')} in this second: {tokens}")
    return step_hit(steps, index)


def step_hit(steps: StepColumns, index: int) -> LaneHit:
    """Return the hit for a step, at the time when its frame was published: the step's end."""
    batch, took_s = steps.batch(index), float(steps.end_ns[index] - steps.begin_ns[index]) / 1e9
    words = (
        f"Step {count(int(steps.step[index]))}: {plural(batch.numbers.size, 'request')}, "
        f"{count(int(steps.prefill[index]))} prefill and {count(int(steps.decode[index]))} decode tokens, "
        f"{seconds(took_s)}"
    )
    time_ns = int(steps.end_ns[index]) + STEP_MARGIN_NS
    return LaneHit(time_ns, words, int(steps.epoch[index]), 0, tuple(batch.numbers.tolist()))


def hit_row(row: int, shown: ShownLanes, time_ns: int, reach_ns: int) -> LaneHit:
    """Return the request phase in `row` at `time_ns`, or the nearest within `reach_ns`."""
    spans = shown.lanes.spans
    ends = np.where(spans["end"] == OPEN_NS, max(shown.until_ns, time_ns), spans["end"])
    near = (spans["begin"] <= time_ns + reach_ns) & (ends >= time_ns - reach_ns)
    indices = np.flatnonzero((shown.rows[spans["request"]] == row) & near)
    if not indices.size:
        return LaneHit(time_ns)
    away = np.maximum(spans["begin"][indices] - time_ns, time_ns - ends[indices]).clip(0)
    index = int(indices[np.lexsort((-spans["phase"][indices].astype(np.int64), away))[0]])
    return _span_hit(index, shown, time_ns)


def _span_hit(index: int, shown: ShownLanes, time_ns: int) -> LaneHit:
    spans, requests = shown.lanes.spans, shown.lanes.requests
    request, phase = int(spans["request"][index]), RequestPhase(int(spans["phase"][index]))
    number, epoch = int(requests["number"][request]), int(requests["epoch"][request])
    begin, end = int(spans["begin"][index]), int(spans["end"][index])
    stops, until = shown.overview.stops, min(end, shown.until_ns)
    running_ns = stops.running_ns(begin, until)
    lasted = "" if phase >= RequestPhase.ABORTED else f" for {seconds(running_ns / 1e9)}"
    if stopped_ns := stops.stopped_ns(begin, until):
        lasted += f" (without {seconds(stopped_ns / 1e9)} {stops.stopped_text((begin, until))})"
    going_on = " so far" if end == OPEN_NS else ""
    adapter = shown.adapter_of(epoch, number)
    whose = f"#{count(number)} ({adapter})" if adapter else f"#{count(number)}"
    words = f"{whose} {PHASE_TEXTS[phase]}{lasted}{going_on}"
    # the event at the end of waiting states the cause
    at_ns = end if phase is RequestPhase.QUEUED and end != OPEN_NS else begin
    causes = shown.overview.events.find(at_ns, at_ns, request=(epoch, number))
    reasons = [
        why_text(shown.overview.events[cause].event) for cause in causes if _is_of(shown.overview.events[cause], number)
    ]
    clamped_ns = min(max(time_ns, begin), end)
    return LaneHit(clamped_ns, ": ".join([words, *reasons[:1]]), epoch, number)


def _is_of(timed: TimedEvent, number: int) -> bool:
    return timed.event.number == number and timed.event.kind != "note"


def _near(name: str, shown: ShownLanes, time_ns: int, reach_ns: int) -> list[TimedEvent]:
    lane = TICK_LANES.get(name)
    if lane is None or not lane.kind:
        return []
    events: EventIndex = shown.overview.events
    first, last = time_ns - reach_ns, time_ns + reach_ns
    if name == "swapped":
        times = moments_of(name, shown)
        if np.searchsorted(times, first, "left") == np.searchsorted(times, last, "right"):
            return []
    near = [events[index] for index in events.find(first, last, (lane.kind,)).tolist()]
    return [timed for timed in near if name != "swapped" or (timed.event.data and timed.event.data.is_swapped)]


def _events_text(near: list[TimedEvent], nearest: TimedEvent) -> str:
    in_order = sorted(near, key=lambda timed: abs(timed.time_ns - nearest.time_ns))
    lines = [_event_text(timed) for timed in in_order[:_MAX_NAMED]]
    more = len(near) - len(lines)
    return "\n".join([*lines, f"and {count(more)} more here: zoom in"] if more > 0 else lines)


def _event_text(timed: TimedEvent) -> str:
    event = timed.event
    whom = f" #{count(event.number)}" if event.number else ""
    why = why_text(event)
    return f"{clock_text(timed.time_ns)} {kind_text(event.kind)}{whom}" + (f": {why}" if why else "")


def _state_text(overview: SessionOverview, index: int) -> str:
    at = {name: float(overview.column(name)[index]) for name in ("active_blocks", "cached_blocks", "free_blocks")}
    active, _ = usage_shares(overview)
    running, waiting = (int(overview.column(f"num_{name}")[index]) for name in ("running", "waiting"))
    load = f"{count(running)} running, {count(waiting)} waiting"
    if np.isnan([*at.values()]).any():
        in_use = percent(float(active[index])) if np.isfinite(active[index]) else UNKNOWN
        return f"in use: {in_use}, {count(np.nan_to_num(at['cached_blocks']))} keep a prefix · {load}"
    return (
        f"{percent(float(active[index]))} in use: {plural(int(at['active_blocks']), 'block')} active, "
        f"{count(at['cached_blocks'])} cached, {count(at['free_blocks'])} free · {load}"
    )


def _gap_text(overview: SessionOverview, time_ns: int, reach_ns: int) -> str:
    for begin, end in zip(*(times.tolist() for times in gaps(overview)), strict=True):
        if begin - reach_ns <= time_ns <= end + reach_ns:
            return f"nothing came for {seconds((end - begin) / 1e9)}"
    near = np.flatnonzero(
        (overview.column("num_lost_frames") > 0) & (np.abs(overview.time_ns - time_ns) <= SECOND_NS + reach_ns)
    )
    lost = int(overview.column("num_lost_frames")[near].sum())
    return f"{plural(lost, 'frame')} lost here" if lost else ""
