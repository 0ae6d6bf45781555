"""Plots of the requests in the table: TTFT over prompt length, and histograms of TTFT and time per output token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from PySide6.QtCore import QEvent, QPoint, QRect, QSize, Qt, Signal
from PySide6.QtGui import QColor, QHelpEvent, QImage, QMouseEvent, QPainter, QPaintEvent
from PySide6.QtWidgets import QHBoxLayout, QSizePolicy, QToolTip, QWidget

from kvscope_app.ui.fonts import sans
from kvscope_app.ui.number_text import count, plural, seconds
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.zoom import scaled
from kvscope_telemetry.request_log import RequestColumns

NO_VALUES: Final = "No values yet"
_NUM_BINS: Final = 24
_NEAR: Final = 8
"""Maximum distance in pixels between the mouse and a point under it."""
_DOT: Final = 2
_LEFT: Final = 46
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogHistogram:
    """Number of values in each bin between `edges`; consecutive edges have equal ratios."""

    edges: FloatArray
    counts: IntArray


def histogram_of(values: FloatArray) -> LogHistogram | None:
    """Return the histogram of the finite positive values, or None if there are none."""
    known = values[np.isfinite(values) & (values > 0)]
    if not known.size:
        return None
    low, high = float(known.min()), float(known.max())
    edges = np.geomspace(low, high if high > low else low * 1.01, _NUM_BINS + 1)
    edges[0], edges[-1] = low, max(high, edges[-1])  # rounding must not exclude the extremes
    return LogHistogram(edges, np.histogram(known, edges)[0])


class RequestPlots(QWidget):
    request_chosen = Signal(object)
    """Emitted with the key of the request whose point was clicked."""

    def __init__(self) -> None:
        super().__init__()
        self.scatter = ScatterPlot()
        self.ttft = HistogramPlot("TTFT")
        self.tpot = HistogramPlot("Time per token")
        self.scatter.chosen.connect(self.request_chosen)
        row = QHBoxLayout(self)
        row.setContentsMargins(8, 4, 8, 6)
        row.setSpacing(14)
        for plot in self.plots:
            row.addWidget(plot, 1)

    @property
    def plots(self) -> tuple[_Plot, ...]:
        return self.scatter, self.ttft, self.tpot

    def show_requests(self, columns: RequestColumns, rows: npt.NDArray[np.intp]) -> None:
        ttft_s = columns.ttft_s[rows]
        self.scatter.show_points(columns.key[rows], columns.num_prompt_tokens[rows], ttft_s, columns.number[rows])
        self.ttft.show_histogram(histogram_of(ttft_s))
        self.tpot.show_histogram(histogram_of(columns.tpot_s[rows]))

    def apply_theme(self, theme: Theme) -> None:
        for plot in self.plots:
            plot.theme = theme
            plot.update()


class _Plot(QWidget):
    """Base of plots: title, frame and axis labels. A subclass draws the content in `_draw`."""

    theme: Theme = DARK

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title
        self.setAccessibleName(title)
        self.setMouseTracking(True)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)

    def minimumSizeHint(self) -> QSize:
        return QSize(scaled(60), scaled(60))

    def tip(self, position: QPoint) -> str:
        raise NotImplementedError

    @property
    def area(self) -> QRect:
        line = self._line()
        return QRect(
            scaled(_LEFT), line + 4, max(self.width() - scaled(_LEFT) - 6, 1), max(self.height() - 2 * line - 10, 1)
        )

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            QToolTip.showText(event.globalPos(), self.tip(event.pos()), self)
            return True
        return super().event(event)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter, area = QPainter(self), self.area
        painter.setFont(sans(0.85))
        painter.setPen(QColor(self.theme.muted))
        title = painter.fontMetrics().elidedText(self._title, Qt.TextElideMode.ElideRight, self.width())
        painter.drawText(QRect(0, 0, self.width(), self._line()), Qt.AlignmentFlag.AlignLeft, title)
        painter.setPen(QColor(self.theme.border))
        painter.drawLine(area.bottomLeft(), area.bottomRight())
        painter.drawLine(area.topLeft(), area.bottomLeft())
        painter.setPen(QColor(self.theme.muted))
        self._draw(painter, area)
        painter.end()

    def _draw(self, painter: QPainter, area: QRect) -> None:
        raise NotImplementedError

    def _draw_labels(self, painter: QPainter, area: QRect, left: tuple[str, str], below: tuple[str, str]) -> None:
        """Draw the lowest and the highest value of each axis."""
        align, line = Qt.AlignmentFlag, self._line()
        for text, y in zip(left, (area.bottom() - line, area.top()), strict=True):
            painter.drawText(QRect(0, y, area.left() - 5, line), align.AlignRight | align.AlignVCenter, text)
        strip = QRect(area.left(), area.bottom() + 3, area.width(), line)
        painter.drawText(strip, align.AlignRight, below[1])
        if painter.fontMetrics().horizontalAdvance("  ".join(below)) <= strip.width():
            painter.drawText(strip, align.AlignLeft, below[0])

    def _line(self) -> int:
        return self.fontMetrics().height()


class ScatterPlot(_Plot):
    """Plot of TTFT over prompt length with a dot per request. Hovering shows a request, a click selects it."""

    chosen = Signal(object)

    def __init__(self) -> None:
        super().__init__("TTFT over prompt length")
        self._keys = self._numbers = self._x = np.empty(0, np.int64)
        self._y = np.empty(0)

    def show_points(self, keys: IntArray, prompt_tokens: IntArray, ttft_s: FloatArray, numbers: IntArray) -> None:
        known = np.isfinite(ttft_s)
        shown = (keys[known], prompt_tokens[known], ttft_s[known])
        if all(np.array_equal(new, old) for new, old in zip(shown, (self._keys, self._x, self._y), strict=True)):
            return
        self._keys, self._x, self._y = shown
        self._numbers = numbers[known]
        self.setAccessibleDescription(plural(self._keys.size, "request"))
        self.update()

    def position_of(self, key: int) -> QPoint | None:
        at = np.flatnonzero(self._keys == key)
        if not at.size:
            return None
        x, y = self._pixels(self.area)
        return QPoint(int(x[at[0]]), int(y[at[0]]))

    def tip(self, position: QPoint) -> str:
        at = self._at(position)
        if at is None:
            return ""
        return f"#{count(self._numbers[at])}: {plural(int(self._x[at]), 'prompt token')}, TTFT {seconds(self._y[at])}"

    def mousePressEvent(self, event: QMouseEvent) -> None:
        at = self._at(event.position().toPoint())
        if at is not None and event.button() is Qt.MouseButton.LeftButton:
            self.chosen.emit(int(self._keys[at]))

    def _at(self, position: QPoint) -> int | None:
        if not self._keys.size:
            return None
        x, y = self._pixels(self.area)
        distance = np.hypot(x - position.x(), y - position.y())
        nearest = int(distance.argmin())
        return nearest if distance[nearest] <= _NEAR else None

    def _pixels(self, area: QRect) -> tuple[IntArray, IntArray]:
        """Return the positions of the dots; both axes start at 0."""
        x = area.left() + self._x * (area.width() - 1) / max(int(self._x.max()), 1)
        y = area.bottom() - self._y * (area.height() - 1) / max(float(self._y.max()), 1e-9)
        return np.rint(x).astype(np.int64), np.rint(y).astype(np.int64)

    def _draw(self, painter: QPainter, area: QRect) -> None:
        if not self._keys.size:
            painter.drawText(area, Qt.AlignmentFlag.AlignCenter, NO_VALUES)
            return
        below = "0", f"{count(self._x.max())} tokens"
        self._draw_labels(painter, area, ("0", seconds(float(self._y.max()))), below)
        # All dots as one image: 100,000 painter calls would take a second.
        side = 2 * _DOT + 1
        pixels = np.zeros((area.height() + 2 * _DOT, area.width() + 2 * _DOT), np.uint32)
        x, y = self._pixels(area)
        ink = QColor(self.theme.accent).rgba()
        for across in range(side):
            for down in range(side):
                pixels[y - area.top() + down, x - area.left() + across] = ink
        image = QImage(
            pixels.data, pixels.shape[1], pixels.shape[0], pixels.strides[0], QImage.Format.Format_ARGB32_Premultiplied
        )
        painter.drawImage(area.left() - _DOT, area.top() - _DOT, image)


class HistogramPlot(_Plot):
    """Histogram with a bar per bin and a logarithmic horizontal axis."""

    def __init__(self, title: str) -> None:
        super().__init__(title)
        self.histogram: LogHistogram | None = None

    def show_histogram(self, histogram: LogHistogram | None) -> None:
        self.histogram = histogram
        num_values = 0 if histogram is None else int(histogram.counts.sum())
        self.setAccessibleDescription(plural(num_values, "request"))
        self.update()

    def tip(self, position: QPoint) -> str:
        area, histogram = self.area, self.histogram
        if histogram is None or not area.contains(position):
            return ""
        bin_index = min((position.x() - area.left()) * _NUM_BINS // area.width(), _NUM_BINS - 1)
        low, high = histogram.edges[bin_index : bin_index + 2].tolist()
        return f"{seconds(low)} to {seconds(high)}: {plural(int(histogram.counts[bin_index]), 'request')}"

    def _draw(self, painter: QPainter, area: QRect) -> None:
        histogram = self.histogram
        if histogram is None:
            painter.drawText(area, Qt.AlignmentFlag.AlignCenter, NO_VALUES)
            return
        most = int(histogram.counts.max())
        below = seconds(float(histogram.edges[0])), seconds(float(histogram.edges[-1]))
        self._draw_labels(painter, area, ("0", count(most)), below)
        for index, number in enumerate(histogram.counts.tolist()):
            left = area.left() + 1 + index * area.width() // _NUM_BINS
            right = area.left() + (index + 1) * area.width() // _NUM_BINS
            height = round(number * (area.height() - 2) / most)
            painter.fillRect(left, area.bottom() - height, right - left, height, QColor(self.theme.accent))
