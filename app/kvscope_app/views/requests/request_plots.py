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
_HOVER_DISTANCE_PX: Final = 8
_DOT_RADIUS: Final = 2
_LEFT_MARGIN: Final = 46
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogHistogram:
    """Histogram with the number of values in each bin. `edges` has one more element than `counts`, with a constant
    ratio between neighbours.
    """

    edges: FloatArray
    counts: IntArray


def histogram_of(values: FloatArray) -> LogHistogram | None:
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        return None
    low, high = float(positive.min()), float(positive.max())
    edges = np.geomspace(low, high if high > low else low * 1.01, _NUM_BINS + 1)
    edges[0], edges[-1] = low, max(high, edges[-1])  # rounding must not exclude the extremes
    return LogHistogram(edges, np.histogram(positive, edges)[0])


class RequestPlots(QWidget):
    request_chosen = Signal(object)

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
        line = self._line_height()
        left = scaled(_LEFT_MARGIN)
        return QRect(left, line + 4, max(self.width() - left - 6, 1), max(self.height() - 2 * line - 10, 1))

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
        painter.drawText(QRect(0, 0, self.width(), self._line_height()), Qt.AlignmentFlag.AlignLeft, title)
        painter.setPen(QColor(self.theme.border))
        painter.drawLine(area.bottomLeft(), area.bottomRight())
        painter.drawLine(area.topLeft(), area.bottomLeft())
        painter.setPen(QColor(self.theme.muted))
        self._draw(painter, area)
        painter.end()

    def _draw(self, painter: QPainter, area: QRect) -> None:
        raise NotImplementedError

    def _draw_labels(
        self, painter: QPainter, area: QRect, left_labels: tuple[str, str], bottom_labels: tuple[str, str]
    ) -> None:
        align, line = Qt.AlignmentFlag, self._line_height()
        for text, y in zip(left_labels, (area.bottom() - line, area.top()), strict=True):
            painter.drawText(QRect(0, y, area.left() - 5, line), align.AlignRight | align.AlignVCenter, text)
        strip = QRect(area.left(), area.bottom() + 3, area.width(), line)
        painter.drawText(strip, align.AlignRight, bottom_labels[1])
        if painter.fontMetrics().horizontalAdvance("  ".join(bottom_labels)) <= strip.width():
            painter.drawText(strip, align.AlignLeft, bottom_labels[0])

    def _line_height(self) -> int:
        return self.fontMetrics().height()


class ScatterPlot(_Plot):
    """Plot of TTFT over prompt length, with a dot per request. The tooltip describes a request; a click selects it."""

    chosen = Signal(object)

    def __init__(self) -> None:
        super().__init__("TTFT over prompt length")
        self._keys = self._numbers = self._x = np.empty(0, np.int64)
        self._y = np.empty(0)

    def show_points(self, keys: IntArray, prompt_tokens: IntArray, ttft_s: FloatArray, numbers: IntArray) -> None:
        is_known = np.isfinite(ttft_s)
        shown = (keys[is_known], prompt_tokens[is_known], ttft_s[is_known])
        if all(np.array_equal(new, old) for new, old in zip(shown, (self._keys, self._x, self._y), strict=True)):
            return
        self._keys, self._x, self._y = shown
        self._numbers = numbers[is_known]
        self.setAccessibleDescription(plural(self._keys.size, "request"))
        self.update()

    def position_of(self, key: int) -> QPoint | None:
        indices = np.flatnonzero(self._keys == key)
        if not indices.size:
            return None
        x, y = self._pixels(self.area)
        return QPoint(int(x[indices[0]]), int(y[indices[0]]))

    def tip(self, position: QPoint) -> str:
        index = self._dot_at(position)
        if index is None:
            return ""
        prompt = plural(int(self._x[index]), "prompt token")
        return f"#{count(self._numbers[index])}: {prompt}, TTFT {seconds(self._y[index])}"

    def mousePressEvent(self, event: QMouseEvent) -> None:
        index = self._dot_at(event.position().toPoint())
        if index is not None and event.button() is Qt.MouseButton.LeftButton:
            self.chosen.emit(int(self._keys[index]))

    def _dot_at(self, position: QPoint) -> int | None:
        if not self._keys.size:
            return None
        x, y = self._pixels(self.area)
        distance = np.hypot(x - position.x(), y - position.y())
        nearest = int(distance.argmin())
        return nearest if distance[nearest] <= _HOVER_DISTANCE_PX else None

    def _pixels(self, area: QRect) -> tuple[IntArray, IntArray]:
        """Return the x and y pixel coordinates of the dots, shape (n,) each. Both axes start at value 0."""
        x = area.left() + self._x * (area.width() - 1) / max(int(self._x.max()), 1)
        y = area.bottom() - self._y * (area.height() - 1) / max(float(self._y.max()), 1e-9)
        return np.rint(x).astype(np.int64), np.rint(y).astype(np.int64)

    def _draw(self, painter: QPainter, area: QRect) -> None:
        if not self._keys.size:
            painter.drawText(area, Qt.AlignmentFlag.AlignCenter, NO_VALUES)
            return
        bottom_labels = "0", f"{count(self._x.max())} tokens"
        self._draw_labels(painter, area, ("0", seconds(float(self._y.max()))), bottom_labels)
        # All dots as one image: 100,000 painter calls would take a second.
        side = 2 * _DOT_RADIUS + 1
        pixels = np.zeros((area.height() + 2 * _DOT_RADIUS, area.width() + 2 * _DOT_RADIUS), np.uint32)
        x, y = self._pixels(area)
        color = QColor(self.theme.accent).rgba()
        for dx in range(side):
            for dy in range(side):
                pixels[y - area.top() + dy, x - area.left() + dx] = color
        image = QImage(
            pixels.data, pixels.shape[1], pixels.shape[0], pixels.strides[0], QImage.Format.Format_ARGB32_Premultiplied
        )
        painter.drawImage(area.left() - _DOT_RADIUS, area.top() - _DOT_RADIUS, image)


class HistogramPlot(_Plot):
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
        max_count = int(histogram.counts.max())
        bottom_labels = seconds(float(histogram.edges[0])), seconds(float(histogram.edges[-1]))
        self._draw_labels(painter, area, ("0", count(max_count)), bottom_labels)
        for index, number in enumerate(histogram.counts.tolist()):
            left = area.left() + 1 + index * area.width() // _NUM_BINS
            right = area.left() + (index + 1) * area.width() // _NUM_BINS
            height = round(number * (area.height() - 2) / max_count)
            painter.fillRect(left, area.bottom() - height, right - left, height, QColor(self.theme.accent))
