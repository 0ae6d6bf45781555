"""Draws the lanes of an overview for a span of time into a pixel array. The drawing time depends on the number of
pixels, not on the amount of data.

Owns the assignment of requests to rows in the visible span. Imports no widget; the canvas draws the text on top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.session.stop_bands import stops_until
from kvscope_app.session.time_span import TimeSpan
from kvscope_app.ui.theme import Theme
from kvscope_app.views.timeline import lane_raster
from kvscope_app.views.timeline.lane_colors import (
    PHASE_COLORS,
    QUEUED_PALENESS,
    STOPPED_BACKGROUND_PALENESS,
    STOPPED_COLOR,
    STOPPED_PALENESS,
    pale_pixel,
    theme_pixel,
)
from kvscope_app.views.timeline.lane_layout import MARKS, PAUSED, STEPS, TICK_LANES, LaneLayout, axis_height, row_height
from kvscope_app.views.timeline.lane_raster import FloatArray, IntArray, Pixels
from kvscope_app.views.timeline.mark_lane import LaneMarks
from kvscope_app.views.timeline.request_lanes import OPEN_NS, RequestLanes
from kvscope_app.views.timeline.step_lane import draw_request_parts, draw_steps, steps_are_wide
from kvscope_app.views.timeline.steps import StepColumns
from kvscope_telemetry.messages.event_kinds import KIND_CODES
from kvscope_telemetry.request_phase import RequestPhase
from kvscope_telemetry.summaries.run_figures import pool_of, usage_of
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

_ROW_GAP: Final = 3
_BETWEEN_STEPS_PALENESS: Final = 0.7
_GAP_COLOR: Final = "warn"
_PAUSED_COLOR: Final = "warn"


@dataclass(slots=True)
class ShownLanes:
    overview: SessionOverview
    lanes: RequestLanes
    span: TimeSpan
    until_ns: int
    first_row: int = 0
    is_by_arrival: bool = False
    assigned_version: int = -1
    """Version of `lanes` for which `rows` was computed; -1 before the first computation."""
    rows: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """Row in which each request is drawn, shape (requests,), -1 if it is outside the span. Computed by `assign_rows`.
    """
    num_rows: int = 0
    marks: LaneMarks = field(default_factory=LaneMarks)
    steps: StepColumns | None = None
    """Steps read for the visible span; None if it is too long to show single steps."""
    adapter_of: Callable[[int, int], str] = lambda epoch, number: ""
    """Function from (epoch, number) to the request's LoRA adapter, "" if it has none or it is unknown."""

    def assign_rows(self) -> None:
        """Assign rows to the requests in the span. They are packed or, if `is_by_arrival`, have one row each, newest at
        the bottom.
        """
        requests = self.lanes.requests
        self.assigned_version = self.lanes.version
        is_visible = (requests["begin"] <= self.span.end_ns) & (requests["end"] >= self.span.begin_ns)
        indices = np.flatnonzero(is_visible)
        self.rows = np.full(len(requests), -1, np.int64)
        if self.is_by_arrival:
            self.rows[indices[np.argsort(requests["begin"][indices], kind="stable")]] = np.arange(indices.size)
        else:  # omit rows without any request in the span
            self.rows[indices] = np.unique(requests["row"][indices], return_inverse=True)[1]
        self.num_rows = int(self.rows.max(initial=-1)) + 1


def draw(shown: ShownLanes, layout: LaneLayout, theme: Theme, scale: float) -> Pixels:
    """Return the pixels of the area right of the lane names, including the axis. `scale`: device pixels per logical
    pixel.
    """
    width, height = (max(1, round(side * scale)) for side in (layout.chart_width, layout.height))
    pixels = np.full((height, width), theme_pixel("base", theme), np.uint32)
    edges = lane_raster.column_edges(shown.span, width)
    seconds = lane_raster.seconds_in(shown.overview.time_ns, edges)
    stopped = lane_raster.covered(*stops_until(shown.overview, shown.until_ns).stretches, edges)
    pixels[round(axis_height() * scale) :, stopped] = pale_pixel("warn", theme, STOPPED_BACKGROUND_PALENESS)
    for lane, top, lane_height in layout.boxes():
        box = pixels[round(top * scale) : round((top + lane_height) * scale)]
        box[:, ~stopped] = pale_pixel("raised", theme, 0.55)
        if lane.name == "usage":
            _draw_usage(box, shown.overview, seconds, theme)
        elif lane.name in ("running", "waiting"):
            color = "good" if lane.name == "running" else "warn"
            counts = shown.overview.column(f"num_{lane.name}") / max(peak_requests(shown.overview, lane.name), 1.0)
            _draw_count(box, counts, seconds, theme, color)
        elif lane.name == STEPS:
            draw_steps(box, shown.overview, shown.steps, edges, seconds, theme)
        elif lane.name == PAUSED:
            lane_raster.fill_below(box, stopped.astype(np.float64), theme_pixel(_PAUSED_COLOR, theme))
        elif lane.name != MARKS:  # bookmarks are drawn later, as signs and text
            _draw_moments(box, lane.name, shown, edges, seconds, theme)
    _draw_requests(pixels, shown, layout, theme, scale, stopped)
    return pixels


def usage_shares(overview: SessionOverview) -> tuple[FloatArray, FloatArray]:
    """Return two shares (0 to 1) of the block pool for each second: that of active blocks, and that of active
    and cached blocks together. Shape (seconds,) each.
    """
    active, cached = overview.column("active_blocks"), overview.column("cached_blocks")
    pool = np.maximum(pool_of(overview), 1.0)
    return usage_of(overview), (active + cached) / pool


def gaps(overview: SessionOverview) -> tuple[IntArray, IntArray]:
    """Return the starts and ends of the time ranges without data, shape (n,) each, int64 ns."""
    times = overview.time_ns
    indices = np.flatnonzero(np.diff(times) > SECOND_NS)
    return times[indices] + SECOND_NS, times[indices + 1]


def lanes_without_data(overview: SessionOverview) -> frozenset[str]:
    """Return the names of the lanes without data in `overview`. The bookmark lane is always included, because
    an overview contains no bookmarks.
    """
    names = {name for name in TICK_LANES if not _counts(name, overview).any()}
    names -= {name for name in names if (overview.events.kind_codes == KIND_CODES.get(name, -1)).any()}
    if not np.nan_to_num(overview.column("num_steps")).any():
        names.add(STEPS)
    has_gap = gaps(overview)[0].size or overview.column("num_lost_frames").any()
    if not len(overview.stops):
        names.add(PAUSED)
    return frozenset(names if has_gap else names | {"gaps"}) | {MARKS}


def event_times(name: str, shown: ShownLanes) -> IntArray:
    """Return the exact times of the events in lane `name`, ascending. Events that the overview has dropped are
    missing.
    """
    if name == "swapped":
        spans = shown.lanes.spans
        return np.sort(spans["begin"][spans["phase"] == RequestPhase.SWAPPED])
    events = shown.overview.events
    times: IntArray = events.time_ns[events.kind_codes == KIND_CODES.get(name, -1)]
    return times


def _counts(name: str, overview: SessionOverview) -> FloatArray:
    column = TICK_LANES[name].column
    return np.nan_to_num(overview.column(column)) if column else np.zeros(len(overview))


def _draw_usage(box: Pixels, overview: SessionOverview, seconds: tuple[IntArray, IntArray], theme: Theme) -> None:
    active, used = usage_shares(overview)
    lane_raster.fill_below(box, lane_raster.min_and_max(used, *seconds)[1], theme_pixel("block_cached", theme))
    low, high = lane_raster.min_and_max(active, *seconds)
    lane_raster.fill_below(box, high, pale_pixel("block_active", theme, 0.35))
    lane_raster.fill_below(box, low, theme_pixel("block_active", theme))


def peak_requests(overview: SessionOverview, state: str) -> float:
    """Return the largest number of requests that were in `state` ("running" or "waiting") at any moment. Peaks
    between two per-second values count as well.
    """
    columns = (overview.column(f"{prefix}_{state}") for prefix in ("num", "peak"))
    return max(float(np.nan_to_num(column).max(initial=0.0)) for column in columns)


def _draw_count(box: Pixels, shares: FloatArray, seconds: tuple[IntArray, IntArray], theme: Theme, color: str) -> None:
    low, high = lane_raster.min_and_max(shares, *seconds)
    lane_raster.fill_below(box, high, pale_pixel(color, theme, 0.5))
    lane_raster.fill_below(box, low, theme_pixel(color, theme))


def _draw_moments(
    box: Pixels, name: str, shown: ShownLanes, edges: IntArray, seconds: tuple[IntArray, IntArray], theme: Theme
) -> None:
    overview = shown.overview
    if name == "gaps":
        color = theme_pixel(_GAP_COLOR, theme)
        lane_raster.fill_below(box, lane_raster.covered(*gaps(overview), edges).astype(np.float64), color)
        lane_raster.draw_ticks(
            box, lane_raster.sums(overview.column("num_lost_frames"), *seconds), theme_pixel("bad", theme)
        )
        return
    lane, counts = TICK_LANES[name], lane_raster.moments(event_times(name, shown), edges)
    values = _counts(name, overview)
    if lane.kind:
        values = np.where(overview.time_ns < _exact_since(overview), values, 0.0)
    lane_raster.draw_ticks(box, np.maximum(counts, lane_raster.sums(values, *seconds)), theme_pixel(lane.color, theme))


def _exact_since(overview: SessionOverview) -> int:
    """Return the time from which individual events are known, or 0 if no event was dropped. Older activity is available
    only as per-second counts.
    """
    events = overview.events
    return int(events.time_ns[0]) - SECOND_NS if events.num_forgotten and len(events) else 0


def _draw_requests(
    pixels: Pixels,
    shown: ShownLanes,
    layout: LaneLayout,
    theme: Theme,
    scale: float,
    stopped: npt.NDArray[np.bool_],
) -> None:
    spans, span = shown.lanes.spans, shown.span
    rows = shown.rows[spans["request"]] - shown.first_row
    ends = np.where(spans["end"] == OPEN_NS, max(shown.until_ns, span.begin_ns), spans["end"])
    top, height = round(layout.requests_top * scale), round(row_height() * scale)
    num_rows = -(-max(pixels.shape[0] - top, 0) // height)
    is_visible = (rows >= 0) & (rows < num_rows) & (spans["begin"] <= span.end_ns) & (ends >= span.begin_ns)
    indices = np.flatnonzero(is_visible)
    if not indices.size:
        return
    indices = indices[np.argsort(spans["phase"][indices], kind="stable")]
    width = pixels.shape[1]
    first, last = (_columns(times[indices], span, width) for times in (spans["begin"], ends))
    is_moment = spans["phase"][indices] >= RequestPhase.ABORTED
    first, last = first - is_moment * round(scale), last + is_moment * round(2 * scale)
    palette = np.array([theme_pixel(PHASE_COLORS[phase], theme) for phase in RequestPhase], np.uint32)
    palette[RequestPhase.QUEUED] = pale_pixel(PHASE_COLORS[RequestPhase.QUEUED], theme, QUEUED_PALENESS)
    lines = np.zeros((num_rows, width), np.uint32)
    steps = shown.steps
    if steps is not None and steps_are_wide(steps, span, width):
        for phase in (RequestPhase.RUNNING, RequestPhase.DECODE, RequestPhase.PREFILL):
            palette[phase] = pale_pixel(PHASE_COLORS[phase], theme, _BETWEEN_STEPS_PALENESS)
    lane_raster.draw_spans(lines, rows[indices], first, last, palette[spans["phase"][indices]])
    if steps is not None and steps_are_wide(steps, span, width):
        request_rows = _rows_of_step_requests(steps, shown, num_rows)
        draw_request_parts(lines, steps, span, request_rows, theme, max(round(scale), 1))
    lines[:, stopped] = np.where(lines[:, stopped] != 0, pale_pixel(STOPPED_COLOR, theme, STOPPED_PALENESS), 0)
    for row, line in enumerate(lines):
        begin = top + row * height
        box = pixels[begin : begin + height - round(_ROW_GAP * scale)]
        third = box.shape[0] // 3
        np.copyto(box[third : box.shape[0] - third], line, where=line != 0)
        for edge in (box[:third], box[box.shape[0] - third :]):
            np.copyto(edge, line, where=(line != 0) & (line != palette[RequestPhase.QUEUED]))


def _rows_of_step_requests(steps: StepColumns, shown: ShownLanes, num_rows: int) -> IntArray:
    """Return the drawn row of each request in `steps.numbers`, -1 if the request is not visible."""
    requests, rows = shown.lanes.requests, shown.rows - shown.first_row
    visible = np.flatnonzero((shown.rows >= 0) & (rows >= 0) & (rows < num_rows))
    epochs = np.repeat(steps.epoch, np.diff(steps.starts))
    request_rows = np.full(steps.numbers.size, -1, np.int64)
    for epoch in np.unique(requests["epoch"][visible]).tolist():
        in_epoch = visible[requests["epoch"][visible] == epoch]
        numbers = requests["number"][in_epoch]
        order = np.argsort(numbers, kind="stable")
        index = np.searchsorted(numbers[order], steps.numbers).clip(max=max(numbers.size - 1, 0))
        is_match = (numbers[order][index] == steps.numbers) & (epochs == epoch)
        request_rows[is_match] = rows[in_epoch[order][index]][is_match]
    return request_rows


def _columns(times: IntArray, span: TimeSpan, width: int) -> IntArray:
    # far times would overflow below
    clamped = times.clip(span.begin_ns - span.length_ns, span.end_ns + span.length_ns)
    columns: IntArray = np.floor((clamped - span.begin_ns) * (width / span.length_ns)).astype(np.int64)
    return columns
