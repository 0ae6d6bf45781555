"""Small curves stacked on the heatmap's time axis, and the ruler with the times of day below them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
from PySide6.QtCore import QLineF, QRect, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QWidget

from kvscope_app.ui.fonts import sans
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.chart.curves import FloatArray, nice_ceiling
from kvscope_app.views.heatmap.time_area import TimeArea, gutter
from kvscope_app.views.heatmap.time_frame import TimeFrame
from kvscope_telemetry.summaries.summary import SECOND_NS

IntArray = npt.NDArray[np.int64]
STRIP_HEIGHT: Final = 40
_PADDING: Final = 3
_STEPS_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_MIN_TICK_SPACING: Final = 74
_Curve = tuple[float, list[QLineF]]
"""(value at the top of the strip, lines to draw)."""
_STOP_SHARE: Final = 0.0


class CurveStrip(TimeArea):
    def __init__(
        self,
        frame: TimeFrame,
        title: str,
        tip: str,
        series: int,
        text: Callable[[float], str],
        axis_text: Callable[[float], str],
        top: float | None = None,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(frame, parent)
        self.title = title
        self._series, self._text, self._axis_text, self._fixed_top = series, text, axis_text, top
        self._times: IntArray = np.zeros(0, np.int64)
        self._values: FloatArray = np.zeros(0)
        self._current = float("nan")
        self._cached_curve: tuple[tuple[object, ...], _Curve] | None = None
        """Inputs of the curve drawn last, and the curve, which is reused if only the cursor moves."""
        self.setAccessibleName(title)
        self.setToolTip(tip)
        self.setFixedHeight(scaled(STRIP_HEIGHT))

    def sizeHint(self) -> QSize:
        return QSize(240, scaled(STRIP_HEIGHT))

    def show_values(self, times: IntArray, values: FloatArray) -> None:
        """Show one value for each second, which starts at `times` (ns), shape (n,) each. Unknown values are NaN."""
        self._times, self._values, self._cached_curve = times, values, None
        self.update()

    def show_current(self, value: float) -> None:
        """Set the value at the cursor, whose second may be incomplete; NaN if the value is unknown."""
        if value != self._current:
            self._current = value
            self.update()

    @property
    def value_text(self) -> str:
        value = self._current if self.hover_ns is None else self.value_at(self.hover_ns)
        return self._text(value) if np.isfinite(value) else "–"

    def value_at(self, time_ns: int) -> float:
        """Return the value of the second that contains `time_ns`; NaN if there is none."""
        index = int(np.searchsorted(self._times, time_ns, "right")) - 1
        if index < 0 or time_ns - int(self._times[index]) >= SECOND_NS:
            return float("nan")
        return float(self._values[index])

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(self.rect(), self.theme.color("base"))
        painter.fillRect(gutter(), self.height() - 1, self.width() - gutter(), 1, self.theme.color("grid"))
        self.draw_stops(painter, _STOP_SHARE)
        top, lines = self._curve(painter.fontMetrics().height())
        painter.setPen(QPen(QColor(self.theme.series[self._series]), 1))
        painter.drawLines(lines)
        self.draw_cursor(painter)
        self._draw_labels(painter, top)
        painter.end()

    def _curve(self, text_height: int) -> _Curve:
        inputs = (self.frame.scale, self.width(), self.height(), text_height)
        if self._cached_curve is None or self._cached_curve[0] != inputs:
            lows, highs = self._extremes()
            highest = float(np.nanmax(highs)) if np.isfinite(highs).any() else 0.0
            top = self._fixed_top or nice_ceiling(highest * 1.04)
            self._cached_curve = inputs, (top, self._make_lines(lows / top, highs / top, text_height))
        return self._cached_curve[1]

    def _extremes(self) -> tuple[FloatArray, FloatArray]:
        scale = self.frame.scale
        width = max(self.width() - gutter(), 1)
        edges = scale.begin_ns + np.arange(width + 1) * ((scale.end_ns - scale.begin_ns) / width)
        starts = np.searchsorted(self._times + SECOND_NS, edges[:-1], "right")
        ends = np.searchsorted(self._times, edges[1:], "left")
        lows = np.full(width, np.nan)
        highs = lows.copy()
        with_data = np.flatnonzero(ends > starts)
        if with_data.size:
            values = np.append(self._values, np.nan)
            pairs = np.stack((starts[with_data], ends[with_data]), axis=1).ravel()
            lows[with_data] = np.fmin.reduceat(values, pairs)[::2]
            highs[with_data] = np.fmax.reduceat(values, pairs)[::2]
        return lows, highs

    def _make_lines(self, lows: FloatArray, highs: FloatArray, text_height: int) -> list[QLineF]:
        bottom, plot_height = self.height() - _PADDING, self.height() - 2 * _PADDING - text_height
        lines = []
        columns = np.flatnonzero(np.isfinite(highs))
        ys_low, ys_high = bottom - lows * plot_height, bottom - highs * plot_height
        previous = -2
        for x in columns.tolist():
            top, low = float(ys_high[x]), float(ys_low[x])
            if previous == x - 1:
                joint = min(max(float(ys_low[previous]), top), low)
                lines.append(QLineF(gutter() + previous, float(ys_low[previous]), gutter() + x, joint))
            lines.append(QLineF(gutter() + x, top, gutter() + x, low if low - top > 1 else top + 1))
            previous = x
        return lines

    def _draw_labels(self, painter: QPainter, top: float) -> None:
        value_text = self.value_text
        self.setAccessibleDescription(value_text)
        painter.setFont(sans(0.9))
        metrics = painter.fontMetrics()
        painter.setPen(self.theme.color("muted"))
        line = QRect(gutter() + 4, 1, self.width() - gutter() - 8, metrics.height())
        painter.drawText(line, Qt.AlignmentFlag.AlignLeft, self.title)
        painter.setPen(self.theme.color("text"))
        painter.drawText(line, Qt.AlignmentFlag.AlignRight, value_text)
        painter.setFont(sans(0.82))
        painter.setPen(self.theme.color("muted"))
        small_height = painter.fontMetrics().height()
        rect = QRect(0, metrics.height() - 2, gutter() - 6, small_height)
        painter.drawText(rect, Qt.AlignmentFlag.AlignRight, self._axis_text(top))
        rect.moveTop(self.height() - small_height)
        painter.drawText(rect, Qt.AlignmentFlag.AlignRight, "0")


class Ruler(TimeArea):
    def __init__(self, frame: TimeFrame, parent: QWidget | None = None) -> None:
        super().__init__(frame, parent)
        self.setAccessibleName("Time of day")
        self.setFixedHeight(scaled(20))

    def ticks(self) -> list[tuple[float, str]]:
        scale = self.frame.scale
        width = max(self.width() - gutter(), 1)
        min_step_s = (scale.end_ns - scale.begin_ns) / SECOND_NS * scaled(_MIN_TICK_SPACING) / width
        step = next((step for step in _STEPS_S if step >= min_step_s), _STEPS_S[-1])
        utc_offset_s = time.localtime(scale.begin_ns // SECOND_NS).tm_gmtoff  # round in local time, not in UTC
        first = -(-(scale.begin_ns + utc_offset_s * SECOND_NS) // (step * SECOND_NS))
        last = (scale.end_ns + utc_offset_s * SECOND_NS) // (step * SECOND_NS)
        seconds = [index * step - utc_offset_s for index in range(first, last + 1)]
        return [(self.x_of(second * SECOND_NS), clock_text(second * SECOND_NS)) for second in seconds]

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(self.rect(), self.theme.color("base"))
        painter.setFont(sans(0.86))
        metrics = painter.fontMetrics()
        for x, text in self.ticks():
            painter.fillRect(round(x), 0, 1, 4, self.theme.color("muted"))
            half = metrics.horizontalAdvance(text) / 2
            left = min(max(x - half, gutter() - half), self.width() - 2 * half - 2)
            painter.setPen(self.theme.color("muted"))
            painter.drawText(int(left), 4 + metrics.ascent(), text)
        painter.end()


def clock_text(time_ns: int) -> str:
    """Format a time in ns since 1970 as local time: `14:03:20`."""
    return time.strftime("%H:%M:%S", time.localtime(time_ns // SECOND_NS))
