"""Axes that name few, round values, with units. Times are read backwards from now, or as clock times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pyqtgraph as pg  # type: ignore[import-untyped]
from PySide6.QtCore import QRectF

from kvscope_app.look.fonts import sans
from kvscope_app.look.theme import Theme
from kvscope_app.look.zoom import scaled

VALUE_AXIS_WIDTH = 50
TIME_AXIS_HEIGHT = 20
_TIME_STEPS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
_TICK_FONT_SCALE = 0.86
_HALF_LINE = 10


class _Axis(pg.AxisItem):  # type: ignore[misc]  # pyqtgraph has no types
    """Without a label: to look for its prefix pyqtgraph lays out even an empty one whenever the range changes."""

    def __init__(self, orientation: str) -> None:
        super().__init__(orientation)
        self.enableAutoSIPrefix(False)


class ValueAxis(_Axis):
    """The left axis: zero, the middle and the top."""

    def __init__(self, text: Callable[[float], str]) -> None:
        super().__init__("left")
        self._text = text
        self.fit_zoom()
        self.setStyle(tickLength=0, autoExpandTextSpace=False, tickTextOffset=6, tickAlpha=255)

    def fit_zoom(self) -> None:
        """Room for the labels at the zoom of now."""
        self.setWidth(scaled(VALUE_AXIS_WIDTH))

    def boundingRect(self) -> QRectF:
        """Half a line more above and below: pyqtgraph leaves out labels that reach beyond."""
        wider: QRectF = super().boundingRect().adjusted(0, -scaled(_HALF_LINE), 0, scaled(_HALF_LINE))
        return wider

    def tickValues(self, minVal: float, maxVal: float, size: float) -> list[tuple[float, list[float]]]:
        """Three ticks, two when the plot is low."""
        parts = 2 if size >= 48 else 1
        step = (maxVal - minVal) / parts
        return [(step, [minVal + step * index for index in range(parts + 1)])] if step > 0 else []

    def tickStrings(self, values: Sequence[float], scale: float, spacing: float) -> list[str]:
        """Values with their unit."""
        return [self._text(value) for value in values]


class TimeAxis(_Axis):
    """The bottom axis. While following, `−30 s`; otherwise the time of day.

    Plot coordinates are seconds of this machine's monotonic clock.
    """

    def __init__(self) -> None:
        super().__init__("bottom")
        self.now_s: float | None = None
        """The right edge while following, None otherwise."""
        self._wall_offset_s = time.time() - time.monotonic()
        self._has_labels = True
        self.setStyle(tickLength=0, autoExpandTextSpace=False, tickTextOffset=3, tickAlpha=255)

    def clock_text(self, value: float) -> str:
        """Return the time of day at second `value` of the monotonic clock. The two clocks are compared anew by each
        axis: a second that just begins must not become the one before.
        """
        return time.strftime("%H:%M:%S", time.localtime(round(value + self._wall_offset_s, 1)))

    def show_labels(self, shown: bool) -> None:
        """Write the times below the plot, or leave just the lines."""
        self._has_labels = shown
        self.fit_zoom()
        self.setStyle(showValues=shown)

    def fit_zoom(self) -> None:
        """Room for the labels at the zoom of now."""
        self.setHeight(scaled(TIME_AXIS_HEIGHT) if self._has_labels else 1)

    def tickValues(self, minVal: float, maxVal: float, size: float) -> list[tuple[float, list[float]]]:
        """Round times, at least 70 px apart."""
        wanted = (maxVal - minVal) * scaled(70) / max(size, 1)
        step = next((step for step in _TIME_STEPS_S if step >= wanted), _TIME_STEPS_S[-1])
        origin = self.now_s if self.now_s is not None else -self._wall_offset_s
        first = np.ceil((minVal - origin) / step)
        last = np.floor((maxVal - origin) / step)
        return [(step, [origin + step * index for index in np.arange(first, last + 1)])]

    def tickStrings(self, values: Sequence[float], scale: float, spacing: float) -> list[str]:
        """`−30 s`, or `14:03:20`."""
        if self.now_s is None:
            return [self.clock_text(value) for value in values]
        return [ago_text(self.now_s - value) for value in values]


def ago_text(seconds: float) -> str:
    """`now`, `−5 s`, `−2 min`, `−1.5 h`."""
    if seconds < 0.05:
        return "now"
    if seconds >= 3600 and abs(seconds / 1800 - round(seconds / 1800)) < 1e-6:
        return f"−{seconds / 3600:g} h"
    if seconds >= 60 and abs(seconds / 60 - round(seconds / 60)) < 1e-6:
        return f"−{round(seconds / 60)} min"
    return f"−{seconds:.3g} s"


def color_axis(axis: pg.AxisItem, theme: Theme) -> None:
    """Faint opaque grid lines (blending them costs 25 ms a frame), muted text."""
    axis.setPen(pg.mkPen(theme.grid))
    axis.setTextPen(pg.mkPen(theme.muted))
    axis.setStyle(tickFont=sans(_TICK_FONT_SCALE))
    axis.fit_zoom()
    axis.setGrid(255)
    axis.setZValue(-10)
