"""Panels of overlaid curves of two runs, and the computation of each curve's points. Imports no Qt.

Owns the list of panels. Seconds count from the start of the pair's timeline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from kvscope_app.ui.number_text import NOTHING, percent, short
from kvscope_telemetry.summaries.run_figures import fragmentation_of, usage_of
from kvscope_telemetry.summaries.session_overview import FloatArray, SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

MAX_POINTS: Final = 300
"""Maximum number of points per curve: with more, a dashed curve would look solid."""


def _column(name: str, overview: SessionOverview) -> FloatArray:
    return overview.column(name)


def _with_unit(unit: str, value: float) -> str:
    return f"{short(value)}{unit}" if np.isfinite(value) else NOTHING


def _share(value: float) -> str:
    return percent(value) if np.isfinite(value) else NOTHING


@dataclass(frozen=True, slots=True)
class OverlaidPanel:
    """Definition of a panel: the function that returns its values (one per second), and their formatting."""

    key: str
    title: str
    values: Callable[[SessionOverview], FloatArray]
    text: Callable[[float], str]
    axis_text: Callable[[float], str] = short
    top: float | None = None


def _whole_percent(value: float) -> str:
    return percent(value, 0)


PANELS: Final = (
    OverlaidPanel("usage", "KV usage", usage_of, _share, _whole_percent, 1.0),
    OverlaidPanel("decode", "Decode", partial(_column, "decode_tokens_per_s"), partial(_with_unit, " tok/s")),
    OverlaidPanel("running", "Running", partial(_column, "num_running"), partial(_with_unit, "")),
    OverlaidPanel("waiting", "Waiting", partial(_column, "num_waiting"), partial(_with_unit, "")),
    OverlaidPanel("preemptions", "Preemptions", partial(_column, "preemptions"), partial(_with_unit, " /s")),
    OverlaidPanel("scattered", "External fragmentation", fragmentation_of, _share, _whole_percent, 1.0),
)


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of a curve: times in seconds and values, shape (n,) each. Unknown values are NaN."""

    seconds: FloatArray
    values: FloatArray

    def value_at(self, second: float) -> float:
        """Return the value of the point nearest to `second`.

        Returns NaN if that point is farther away than 1 s and farther than the distance between points.
        """
        if not self.seconds.size:
            return float("nan")
        step = (self.seconds[-1] - self.seconds[0]) / max(self.seconds.size - 1, 1)
        nearest = int(np.argmin(np.abs(self.seconds - second)))
        return float(self.values[nearest]) if abs(self.seconds[nearest] - second) <= max(step, 1.0) else float("nan")


def curve_of(panel: OverlaidPanel, overview: SessionOverview, zero_ns: int, shown_ns: tuple[int, int]) -> Curve:
    """Return the curve of one run in `panel`, for the seconds within `shown_ns`.

    Several seconds are averaged per point if the range has more than `MAX_POINTS` seconds.

    Args:
        panel: Panel in which the curve is drawn.
        overview: Figures per second of the run.
        zero_ns: Time of second 0, on the overview's clock.
        shown_ns: First and last visible time, on the overview's clock.
    """
    times = overview.time_ns
    first = max(0, int(np.searchsorted(times, shown_ns[0], "left")) - 2)
    last = int(np.searchsorted(times, shown_ns[1], "right")) + 1
    seconds_per_point = -(-(min(last, len(times)) - first) // MAX_POINTS)
    if seconds_per_point > 1:
        first -= first % seconds_per_point  # the same seconds are averaged for any range
    seconds = (times[first:last] - zero_ns + SECOND_NS // 2) / 1e9
    values = panel.values(overview)[first:last]
    if seconds_per_point > 1:
        seconds, values = _means(seconds, seconds_per_point), _means(values, seconds_per_point)
    return Curve(seconds, values)


def _means(values: FloatArray, num_averaged: int) -> FloatArray:
    padded = np.pad(values, (0, -values.size % num_averaged), constant_values=np.nan).reshape(-1, num_averaged)
    is_known = np.isfinite(padded)
    counts = is_known.sum(axis=1)
    sums = np.where(is_known, padded, 0.0).sum(axis=1)
    means: FloatArray = np.divide(sums, counts, out=np.full(len(padded), np.nan), where=counts > 0)
    return means
