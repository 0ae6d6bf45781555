"""Lane of steps: tokens computed per second or, when zoomed in, each step as a box. Imports no Qt widgets.

Decides between per-second and per-step drawing. The lower part of a bar is decode tokens, the upper part prefill
tokens. Heights are logarithmic, because a prefill chunk has hundreds of tokens and a decode one per request.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.session.time_span import TimeSpan
from kvscope_app.ui.theme import Theme
from kvscope_app.views.timeline import lane_raster
from kvscope_app.views.timeline.lane_colors import PHASE_COLORS, theme_pixel
from kvscope_app.views.timeline.lane_raster import FloatArray, IntArray, Pixels
from kvscope_app.views.timeline.steps import MAX_STEPS, StepColumns
from kvscope_telemetry.request_phase import RequestPhase
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

_MIN_STEP_WIDTH_PX: Final = 1.5
"""Minimum average width of steps in pixels. Narrower steps are drawn as tokens per second."""
_MIN_GAP_WIDTH_PX: Final = 4.0
_MIN_PART_WIDTH_PX: Final = 5.0


def can_show_steps(overview: SessionOverview, span: TimeSpan, width: int) -> bool:
    """Whether the steps in `span` are few enough to be drawn as boxes, judging by the per-second counts."""
    first, last = overview.index_at(span.begin_ns), overview.index_at(span.end_ns)
    if last < 0:
        return False
    counts = overview.column("num_steps")[max(first, 0) : last + 1]
    seconds = counts.size * SECOND_NS
    expected = float(counts.sum()) * min(1.0, span.length_ns / max(seconds, 1))
    return expected * _MIN_STEP_WIDTH_PX <= width and expected <= MAX_STEPS / 3


def draw_steps(
    box: Pixels,
    overview: SessionOverview,
    steps: StepColumns | None,
    edges: IntArray,
    seconds: tuple[IntArray, IntArray],
    theme: Theme,
) -> None:
    prefill, decode = overview.column("prefill_tokens"), overview.column("decode_tokens")
    max_tokens = float((prefill + decode).max(initial=1.0))
    total, decoded = (lane_raster.min_and_max(values, *seconds)[1] for values in (prefill + decode, decode))
    if steps is not None:
        middles = (edges[:-1] + edges[1:]) // 2
        is_read = (middles >= steps.first_ns) & (middles <= steps.last_ns)
        total, decoded = np.where(is_read, np.nan, total), np.where(is_read, np.nan, decoded)
    _fill(box, total, decoded, max_tokens, theme)
    if steps is not None and len(steps):
        total, decoded = _step_columns(steps, edges)
        _fill(box, total, decoded, _max_tokens(steps, edges), theme)


def steps_are_wide(steps: StepColumns, span: TimeSpan, width: int) -> bool:
    """Whether steps are wide enough to draw each request's tokens in them separately."""
    visible = steps.within(span.begin_ns, span.end_ns)
    lengths = (steps.end_ns - steps.begin_ns)[visible]
    return lengths.size > 0 and float(np.median(lengths)) * width / span.length_ns >= _MIN_PART_WIDTH_PX


def draw_request_parts(
    lines: Pixels, steps: StepColumns, span: TimeSpan, rows_of: npt.NDArray[np.int64], theme: Theme, gap: int
) -> None:
    """Draw each request's tokens in each step into the request's row of `lines`.

    `rows_of`: row of each request in `steps.numbers`, negative for a request that is not visible.
    """
    visible = steps.within(span.begin_ns, span.end_ns)
    offsets = slice(int(steps.starts[visible.start]), int(steps.starts[visible.stop]))
    counts = np.diff(steps.starts[visible.start : visible.stop + 1])
    rows, tokens = rows_of[offsets], steps.tokens[offsets]
    width = lines.shape[1]
    first = np.repeat(_columns(steps.begin_ns[visible], span, width) + gap, counts)
    last = np.repeat(_columns(steps.end_ns[visible], span, width), counts)
    is_visible = (rows >= 0) & (rows < lines.shape[0])
    palette = np.array(
        [theme_pixel(PHASE_COLORS[phase], theme) for phase in (RequestPhase.DECODE, RequestPhase.PREFILL)], np.uint32
    )
    if is_visible.any():
        colors = palette[(tokens[is_visible] > 1).astype(np.int64)]
        lane_raster.draw_spans(lines, rows[is_visible], first[is_visible], last[is_visible], colors)


def _step_columns(steps: StepColumns, edges: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return the total tokens and the decode tokens of the step at each pixel column, shape (columns,) each; NaN where
    there is no step.
    """
    middles = (edges[:-1] + edges[1:]) // 2
    indices = np.minimum(np.searchsorted(steps.end_ns, middles, "left"), len(steps) - 1)
    is_running = (steps.begin_ns[indices] <= middles) & (middles <= steps.end_ns[indices])
    lengths = (steps.end_ns - steps.begin_ns)[indices]
    is_new = np.diff(indices, prepend=-1) != 0
    column_ns = max(int(edges[-1] - edges[0]) // max(edges.size - 1, 1), 1)
    is_running &= ~(is_new & (lengths >= _MIN_GAP_WIDTH_PX * column_ns))
    total = (steps.prefill + steps.decode)[indices].astype(np.float64)
    return np.where(is_running, total, np.nan), np.where(is_running, steps.decode[indices].astype(np.float64), np.nan)


def _max_tokens(steps: StepColumns, edges: IntArray) -> float:
    visible = steps.within(int(edges[0]), int(edges[-1]))
    return float((steps.prefill + steps.decode)[visible].max(initial=1))


def _fill(box: Pixels, total: FloatArray, decode: FloatArray, max_tokens: float, theme: Theme) -> None:
    heights = np.log1p(total) / np.log1p(max(max_tokens, 1.0))
    share = np.divide(decode, total, out=np.zeros_like(decode), where=np.nan_to_num(total) > 0)
    lane_raster.fill_below(box, heights, theme_pixel(PHASE_COLORS[RequestPhase.PREFILL], theme))
    lane_raster.fill_below(box, heights * share, theme_pixel(PHASE_COLORS[RequestPhase.DECODE], theme))


def _columns(times: IntArray, span: TimeSpan, width: int) -> IntArray:
    clamped = times.clip(span.begin_ns - span.length_ns, span.end_ns + span.length_ns)
    columns: IntArray = np.floor((clamped - span.begin_ns) * (width / span.length_ns)).astype(np.int64)
    return columns
