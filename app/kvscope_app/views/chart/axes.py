"""Axes with few labels at round values. Times are labelled backwards from now, or as times of day."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pyqtgraph as pg  # type: ignore[import-untyped]
from PySide6.QtCore import QRectF

from kvscope_app.ui.fonts import sans
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.zoom import scaled

VALUE_AXIS_WIDTH = 50
TIME_AXIS_HEIGHT = 20
_TIME_STEPS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
_TICK_FONT_SCALE = 0.86
_HALF_LINE = 10


class _Axis(pg.AxisItem):  # type: ignore[misc]  # pyqtgraph has no types
    """Axis without a title. pyqtgraph would lay out even an empty title whenever the range changes."""

    def __init__(self, orientation: str) -> None:
        super().__init__(orientation)
        self.enableAutoSIPrefix(False)


class ValueAxis(_Axis):
    def __init__(self, text: Callable[[float], str]) -> None:
        super().__init__("left")
        self._text = text
        self.fit_zoom()
        self.setStyle(tickLength=0, autoExpandTextSpace=False, tickTextOffset=6, tickAlpha=255)

    def fit_zoom(self) -> None:
        self.setWidth(scaled(VALUE_AXIS_WIDTH))

    def boundingRect(self) -> QRectF:
        """Return the rectangle extended by half a line above and below. pyqtgraph omits labels outside of it."""
        extended: QRectF = super().boundingRect().adjusted(0, -scaled(_HALF_LINE), 0, scaled(_HALF_LINE))
        return extended

    def tickValues(self, minVal: float, maxVal: float, size: float) -> list[tuple[float, list[float]]]:
        """Return three ticks, or two if the plot is lower than 48 px."""
        num_intervals = 2 if size >= 48 else 1
        step = (maxVal - minVal) / num_intervals
        return [(step, [minVal + step * index for index in range(num_intervals + 1)])] if step > 0 else []

    def tickStrings(self, values: Sequence[float], scale: float, spacing: float) -> list[str]:
        return [self._text(value) for value in values]


class TimeAxis(_Axis):
    """Bottom axis. Labels are relative to now (`-30 s`) while the chart follows the present, otherwise times of day.

    Plot coordinates are seconds of this machine's monotonic clock.
    """

    def __init__(self) -> None:
        super().__init__("bottom")
        self.now_s: float | None = None
        """Time of the right edge in seconds while the chart follows the present, else None."""
        self._wall_offset_s = time.time() - time.monotonic()
        self._has_labels = True
        self.setStyle(tickLength=0, autoExpandTextSpace=False, tickTextOffset=3, tickAlpha=255)

    def clock_text(self, value: float) -> str:
        """Return the time of day at second `value` of the monotonic clock.

        The time is rounded to 0.1 s, because each axis measures the offset of the two clocks itself. Otherwise a second
        that has just started could be shown as the previous second.
        """
        return time.strftime("%H:%M:%S", time.localtime(round(value + self._wall_offset_s, 1)))

    def show_labels(self, is_shown: bool) -> None:
        self._has_labels = is_shown
        self.fit_zoom()
        self.setStyle(showValues=is_shown)

    def fit_zoom(self) -> None:
        self.setHeight(scaled(TIME_AXIS_HEIGHT) if self._has_labels else 1)

    def tickValues(self, minVal: float, maxVal: float, size: float) -> list[tuple[float, list[float]]]:
        """Return ticks at round times, at least 70 px apart at 100 % zoom."""
        min_step_s = (maxVal - minVal) * scaled(70) / max(size, 1)
        step = next((step for step in _TIME_STEPS_S if step >= min_step_s), _TIME_STEPS_S[-1])
        origin = self.now_s if self.now_s is not None else -self._wall_offset_s
        first = np.ceil((minVal - origin) / step)
        last = np.floor((maxVal - origin) / step)
        return [(step, [origin + step * index for index in np.arange(first, last + 1)])]

    def tickStrings(self, values: Sequence[float], scale: float, spacing: float) -> list[str]:
        if self.now_s is None:
            return [self.clock_text(value) for value in values]
        return [ago_text(self.now_s - value) for value in values]


def ago_text(seconds: float) -> str:
    """Return a label such as `now`, `−5 s`, `−2 min` or `−1.5 h` for a time `seconds` ago."""
    if seconds < 0.05:
        return "now"
    if seconds >= 3600 and abs(seconds / 1800 - round(seconds / 1800)) < 1e-6:
        return f"−{seconds / 3600:g} h"
    if seconds >= 60 and abs(seconds / 60 - round(seconds / 60)) < 1e-6:
        return f"−{round(seconds / 60)} min"
    return f"−{seconds:.3g} s"


def color_axis(axis: pg.AxisItem, theme: Theme) -> None:
    """Apply a theme: muted text, and faint grid lines, which are opaque because blending them takes 25 ms per frame."""
    axis.setPen(pg.mkPen(theme.grid))
    axis.setTextPen(pg.mkPen(theme.muted))
    axis.setStyle(tickFont=sans(_TICK_FONT_SCALE))
    axis.fit_zoom()
    axis.setGrid(255)
    axis.setZValue(-10)
