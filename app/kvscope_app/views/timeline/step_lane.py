"""Lane of steps: tokens computed per second, or, when zoomed in, each step as a box.

Owns the decision between the two. In both, the lower part is decode and the upper part prefill. Heights are
logarithmic, because a prefill chunk has hundreds of tokens and a decode one per request. Imports no widget.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.session.time_span import TimeSpan
from kvscope_app.ui.theme import Theme
from kvscope_app.views.timeline import lane_raster
from kvscope_app.views.timeline.lane_colors import PHASE_COLORS, ink
from kvscope_app.views.timeline.lane_raster import FloatArray, IntArray, Pixels
from kvscope_app.views.timeline.steps import MAX_STEPS, StepColumns
from kvscope_telemetry.request_phase import RequestPhase
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

_LEAST_PX: Final = 1.5
"""Minimum average width of a step; narrower steps are drawn as seconds."""
_APART_PX: Final = 4.0
"""Minimum width of a step to be drawn with a gap before it."""
_PIECES_PX: Final = 5.0


def wants_steps(overview: SessionOverview, span: TimeSpan, width: int) -> bool:
    """Whether single steps should be shown, judging by the per-second counts."""
    first, last = overview.index_at(span.begin_ns), overview.index_at(span.end_ns)
    if last < 0:
        return False
    counts = overview.column("num_steps")[max(first, 0) : last + 1]
    seconds = counts.size * SECOND_NS
    expected = float(counts.sum()) * min(1.0, span.length_ns / max(seconds, 1))
    return expected * _LEAST_PX <= width and expected <= MAX_STEPS / 3


def draw_steps(
    box: Pixels,
    overview: SessionOverview,
    steps: StepColumns | None,
    edges: IntArray,
    seconds: tuple[IntArray, IntArray],
    theme: Theme,
) -> None:
    """Draw seconds, replaced by steps where these have been read."""
    prefill, decode = overview.column("prefill_tokens"), overview.column("decode_tokens")
    most = float((prefill + decode).max(initial=1.0))
    total, decoded = (lane_raster.min_and_max(values, *seconds)[1] for values in (prefill + decode, decode))
    if steps is not None:
        middles = (edges[:-1] + edges[1:]) // 2
        is_read = (middles >= steps.first_ns) & (middles <= steps.last_ns)
        total, decoded = np.where(is_read, np.nan, total), np.where(is_read, np.nan, decoded)
    _fill(box, total, decoded, most, theme)
    if steps is not None and len(steps):
        total, decoded = _step_columns(steps, edges)
        _fill(box, total, decoded, _most_in(steps, edges), theme)


def steps_are_apart(steps: StepColumns, span: TimeSpan, width: int) -> bool:
    """Whether steps are wide enough to show each request's part of them."""
    seen = steps.within(span.begin_ns, span.end_ns)
    lengths = (steps.end_ns - steps.begin_ns)[seen]
    return lengths.size > 0 and float(np.median(lengths)) * width / span.length_ns >= _PIECES_PX


def draw_pieces(
    lines: Pixels, steps: StepColumns, span: TimeSpan, rows_of: npt.NDArray[np.int64], theme: Theme, gap: int
) -> None:
    """Draw each request's part of each step in the request's row of `lines`.

    `rows_of` is the row of each of the steps' requests, negative for one that is not visible.
    """
    seen = steps.within(span.begin_ns, span.end_ns)
    part = slice(int(steps.starts[seen.start]), int(steps.starts[seen.stop]))
    counts = np.diff(steps.starts[seen.start : seen.stop + 1])
    rows, tokens = rows_of[part], steps.tokens[part]
    width = lines.shape[1]
    first = np.repeat(_columns(steps.begin_ns[seen], span, width) + gap, counts)
    last = np.repeat(_columns(steps.end_ns[seen], span, width), counts)
    shown = (rows >= 0) & (rows < lines.shape[0])
    palette = np.array(
        [ink(PHASE_COLORS[phase], theme) for phase in (RequestPhase.DECODE, RequestPhase.PREFILL)], np.uint32
    )
    if shown.any():
        lane_raster.draw_spans(
            lines, rows[shown], first[shown], last[shown], palette[(tokens[shown] > 1).astype(np.int64)]
        )


def _step_columns(steps: StepColumns, edges: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return the total and the decode tokens of the step in each column, NaN where there is none."""
    middles = (edges[:-1] + edges[1:]) // 2
    place = np.minimum(np.searchsorted(steps.end_ns, middles, "left"), len(steps) - 1)
    runs = (steps.begin_ns[place] <= middles) & (middles <= steps.end_ns[place])
    lengths = (steps.end_ns - steps.begin_ns)[place]
    is_new = np.diff(place, prepend=-1) != 0
    column_ns = max(int(edges[-1] - edges[0]) // max(edges.size - 1, 1), 1)
    runs &= ~(is_new & (lengths >= _APART_PX * column_ns))
    total = (steps.prefill + steps.decode)[place].astype(np.float64)
    return np.where(runs, total, np.nan), np.where(runs, steps.decode[place].astype(np.float64), np.nan)


def _most_in(steps: StepColumns, edges: IntArray) -> float:
    seen = steps.within(int(edges[0]), int(edges[-1]))
    return float((steps.prefill + steps.decode)[seen].max(initial=1))


def _fill(box: Pixels, total: FloatArray, decode: FloatArray, most: float, theme: Theme) -> None:
    heights = np.log1p(total) / np.log1p(max(most, 1.0))
    share = np.divide(decode, total, out=np.zeros_like(decode), where=np.nan_to_num(total) > 0)
    lane_raster.fill_below(box, heights, ink(PHASE_COLORS[RequestPhase.PREFILL], theme))
    lane_raster.fill_below(box, heights * share, ink(PHASE_COLORS[RequestPhase.DECODE], theme))


def _columns(times: IntArray, span: TimeSpan, width: int) -> IntArray:
    near = times.clip(span.begin_ns - span.length_ns, span.end_ns + span.length_ns)
    columns: IntArray = np.floor((near - span.begin_ns) * (width / span.length_ns)).astype(np.int64)
    return columns
