"""Draws curves over time as inline SVG: several lines on one axis, with a grid, units and an accessible label.

Owns the reduction of many points to the available pixels (the maximum of each interval). The page defines the colours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
WIDTH: Final = 960
LEFT: Final = 64
RIGHT: Final = 12
PLOT_WIDTH: Final = WIDTH - LEFT - RIGHT
TOP: Final = 8
BOTTOM: Final = 22
NOTE_INK: Final = "bookmark"
ALARM_INK: Final = "alarm"
STOP_INK: Final = "stopped"
STOPPED_TIME_INK: Final = "stopped-time"
"""CSS class of the colour that marks, in a request's bar, the time in which the engine was stopped."""
_MAX_POINTS: Final = 480
_NICE: Final = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A curve: `values`, shape (n,), NaN where there is none."""

    name: str
    css_class: str
    values: FloatArray
    is_area: bool = False
    value_name: str = ""
    """Name of a value under the mouse; "" if it is `name`. An area may be drawn behind another, which is part of it."""


@dataclass(frozen=True, slots=True)
class ReportMark:
    """A bookmark or alarm: a moment, or a time range if `end_s` is later than `at_s`."""

    at_s: float
    end_s: float
    html: str
    is_note: bool


@dataclass(frozen=True, slots=True)
class Band:
    """A time range in which the engine was stopped."""

    from_s: float
    until_s: float
    html: str


@dataclass(frozen=True, slots=True)
class ReportTimeAxis:
    """Time axis in seconds of the recording, from the left edge to the right."""

    from_s: float
    until_s: float
    marks: tuple[ReportMark, ...] = ()
    bands: tuple[Band, ...] = ()
    band_name: str = ""
    """Text for the bands in the chart's legend, such as `engine suspended`."""

    def x(self, seconds: float) -> float:
        length_s = max(self.until_s - self.from_s, 1e-9)
        return LEFT + PLOT_WIDTH * min(max((seconds - self.from_s) / length_s, 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Return about ten round times at most, in seconds."""
        return _ticks(self.from_s, self.until_s, 8)


def chart(
    axis: ReportTimeAxis,
    times_s: FloatArray,
    lines: Sequence[ChartLine],
    *,
    unit: str,
    height: int = 150,
    top: float | None = None,
    series: int | None = None,
) -> str:
    """Draw `lines`, whose points are at `times_s`, as SVG. `top` is the upper end of the value axis; by default it is
    chosen from the values. `series` is the index of the chart's values in the report's data.
    """
    top = top if top is not None else chart_top(lines)
    plot_height = height - TOP - BOTTOM

    def y(value: float) -> float:
        return TOP + plot_height * (1 - min(value / top, 1.0))

    parts = [frame(axis, height)]
    for tick in _ticks(0.0, top, 3):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(
            f'<text class="label end" x="{LEFT - 6}" y="{y(tick) + 4:.1f}">{escape(number_text(tick) + unit)}</text>'
        )
    curves = "".join(_path(axis, times_s, line, y, TOP + plot_height) for line in lines)
    parts.append(f'<g class="curves">{curves}</g>')
    parts.append(mark_lines(axis, height))
    text = ", ".join(line.name for line in lines)
    return svg(height, f"{text} over time", "".join(parts), series)


def chart_top(lines: Sequence[ChartLine]) -> float:
    """Return a round number that is at least the largest value."""
    highest = max((float(np.nanmax(line.values)) for line in lines if np.isfinite(line.values).any()), default=0.0)
    return _nice_top(highest)


def frame(axis: ReportTimeAxis, height: int) -> str:
    bottom = height - BOTTOM
    parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/><g class="ticks">']
    for tick in axis.ticks():
        parts.append(f'<line class="grid" x1="{axis.x(tick):.1f}" x2="{axis.x(tick):.1f}" y1="{TOP}" y2="{bottom}"/>')
        # Keep the last label inside the image.
        x, anchor = (WIDTH, "end") if axis.x(tick) > WIDTH - 2 * RIGHT else (axis.x(tick), "mid")
        parts.append(f'<text class="label {anchor}" x="{x:.1f}" y="{height - 6}">{escape(number_text(tick))} s</text>')
    return "".join(parts) + "</g>"


def mark_lines(axis: ReportTimeAxis, height: int) -> str:
    """Draw stops as bands and marks as lines with a flag, above the curves. Their texts are tooltips."""
    parts = []
    for band in axis.bands:
        x, end = axis.x(band.from_s), axis.x(band.until_s)
        width, bottom = max(end - x, 1.0), height - BOTTOM
        parts.append(f'<g class="{STOP_INK}"{time_range(band.from_s, band.until_s)}><title>{band.html}</title>')
        parts.append(f'<rect class="period" x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{bottom - TOP}"/>')
        parts.append(f'<rect class="bar" x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="2"/></g>')
    for mark in axis.marks:
        x, end = axis.x(mark.at_s), axis.x(mark.end_s)
        bottom, ink = height - BOTTOM, NOTE_INK if mark.is_note else ALARM_INK
        times = time_range(mark.at_s, max(mark.at_s, mark.end_s))
        parts.append(f'<g class="bookmark-flag {ink}"{times}><title>{mark.html}</title>')
        if end - x > 1:
            parts.append(f'<rect class="period" x="{x:.1f}" y="{TOP}" width="{end - x:.1f}" height="{bottom - TOP}"/>')
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<path data-x="{x:.1f}" d="M{x - 4:.1f},{TOP - 7} h8 l-4,7 z"/></g>')
    return "".join(parts)


def time_range(from_s: float, until_s: float) -> str:
    """Return the attribute from which the report's script places an element when the charts are zoomed."""
    return f' data-t="{from_s:.3f},{until_s:.3f}"'


def svg(height: int, text: str, inner: str, series: int | None = None) -> str:
    """Wrap `inner`, which has a time axis (`frame`), in an SVG element of the page's width. `text` is the accessible
    label, `series` the index of the values in the report's data.
    """
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img"'
        f' data-time="{"" if series is None else series}"'
        f' aria-label="{escape(text)}">{inner}</svg>'
    )


def number_text(value: float) -> str:
    """Format a number in a short form, with the suffixes k, M and G."""
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{suffix}"
    return f"{value:.4g}"


def _path(axis: ReportTimeAxis, times_s: FloatArray, line: ChartLine, y: object, bottom: float) -> str:
    assert callable(y), "a function of the value"
    runs = _runs(*_thinned(axis, times_s, line.values))
    elements = []
    for run in runs:
        points = " ".join(f"{axis.x(time_s):.1f},{y(value):.1f}" for time_s, value in run)
        if line.is_area:
            ends = f"{axis.x(run[0][0]):.1f},{bottom:.1f} {points} {axis.x(run[-1][0]):.1f},{bottom:.1f}"
            elements.append(f'<polygon class="area {line.css_class}" points="{ends}"/>')
        elif len(run) == 1:
            x, _, at_y = points.partition(",")
            elements.append(f'<circle class="bar {line.css_class}" cx="{x}" cy="{at_y}" r="2.2"/>')
        else:
            elements.append(f'<polyline class="curve {line.css_class}" points="{points}"/>')
    return "".join(elements)


def _thinned(axis: ReportTimeAxis, times_s: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Reduce a curve to at most `_MAX_POINTS` points, each the maximum of an interval, because peaks matter most."""
    if len(times_s) <= _MAX_POINTS:
        return times_s, values
    length_s = max(axis.until_s - axis.from_s, 1e-9)
    interval = np.clip((times_s - axis.from_s) / length_s * _MAX_POINTS, 0, _MAX_POINTS - 1).astype(np.int64)
    maxima = np.full(_MAX_POINTS, -np.inf)
    known = np.isfinite(values)
    np.maximum.at(maxima, interval[known], values[known])
    used_intervals = np.unique(interval)
    at_s = axis.from_s + (used_intervals + 0.5) * length_s / _MAX_POINTS
    return at_s, np.where(np.isfinite(maxima[used_intervals]), maxima[used_intervals], np.nan)


def _runs(times_s: FloatArray, values: FloatArray) -> list[list[tuple[float, float]]]:
    """Split the points into lists of consecutive ones. NaN values and unrecorded time separate the lists."""
    max_gap_s = 2.5 * usual_gap_s(times_s)
    runs: list[list[tuple[float, float]]] = []
    last_s = -math.inf
    for time_s, value in zip(times_s.tolist(), values.tolist(), strict=True):
        if not math.isfinite(value):
            last_s = -math.inf
            continue
        if time_s - last_s > max_gap_s:
            runs.append([])
        runs[-1].append((time_s, value))
        last_s = time_s
    return runs


def usual_gap_s(times_s: FloatArray) -> float:
    return max(1.0, float(np.median(np.diff(times_s)))) if len(times_s) > 1 else 1.0


def _nice_top(value: float) -> float:
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return power * next(nice for nice in _NICE if nice * power >= value * 0.999)


def _ticks(first: float, last: float, count: int) -> list[float]:
    if last <= first:
        return [first]
    step = _nice_top((last - first) / count)
    begin = math.ceil(first / step - 1e-9)
    return [index * step for index in range(begin, begin + count + 2) if index * step <= last + 1e-9 * step]
