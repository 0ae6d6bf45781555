"""Base class of legends: lines of swatches, a colour scale with a label at each end, and the colours of requests.

Owns appearance, layout and height. Must not depend on what the swatches mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from PySide6.QtCore import QRectF, QSize
from PySide6.QtGui import QColor, QLinearGradient, QPainter, QPen
from PySide6.QtWidgets import QSizePolicy, QWidget

from kvscope_app.ui.theme import DARK, owner_colors
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.page_map.legend_items import LegendSwatch, Scale

SWATCH_SIZE: Final = 11
GAP: Final = 6
_BAR_HEIGHT: Final = 9
_NUM_OWNERS: Final = 5
_OWNER_STEP: Final = 9
PlacedSwatch = tuple[LegendSwatch, int, int]
"""Swatch with its position: (swatch, left edge in pixels, line number)."""


class SwatchLegend(QWidget):
    """Legend with `num_lines` lines.

    `between` is the gap between two swatches, `scale_width` the width of the colour scale; both in pixels at 100 %
    zoom.
    """

    def __init__(self, parent: QWidget | None, *, between: int, scale_width: int) -> None:
        super().__init__(parent)
        self._between_at_100, self._scale_width_at_100 = between, scale_width
        self.theme = DARK
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    @property
    def num_lines(self) -> int:
        return 1

    def sizeHint(self) -> QSize:
        return QSize(200, self.num_lines * self.line_height + 2)

    def minimumSizeHint(self) -> QSize:
        return QSize(60, self.sizeHint().height())

    @property
    def line_height(self) -> int:
        return self.fontMetrics().height() + 4

    def swatch_width(self, swatch: LegendSwatch) -> int:
        return scaled(SWATCH_SIZE) + scaled(GAP) + self._text_width(swatch.label)

    def scale_width(self, scale: Scale) -> int:
        """Return the width of the colour scale, its labels and the gap after it, in pixels."""
        _, low, high = scale
        return self._text_width(low) + self._text_width(high) + self._scale_width + 2 * scaled(GAP) + self._between

    def owners_width(self, label: str) -> int:
        """Return the width of the request colours, their label and the gap after it, in pixels."""
        return _NUM_OWNERS * scaled(_OWNER_STEP) + scaled(GAP) + self._text_width(label) + self._between

    def lay_out_swatches(self, swatches: Iterable[LegendSwatch], left: int) -> Iterator[PlacedSwatch]:
        """Yield the positions of swatches laid out from x = `left`, wrapped into lines."""
        x, line = left, 0
        for swatch in swatches:
            width = self.swatch_width(swatch)
            if x > 0 and x + width > self.width():
                x, line = 0, line + 1
            yield swatch, x, line
            x += width + self._between

    def draw_swatch(self, painter: QPainter, placed: PlacedSwatch) -> QRectF:
        """Draw a swatch and its label. Returns the rectangle of its colour, for marks on top."""
        swatch, x, line = placed
        top = line * self.line_height
        box = QRectF(x, top + (self.line_height - scaled(SWATCH_SIZE)) / 2, scaled(SWATCH_SIZE), scaled(SWATCH_SIZE))
        painter.setPen(QPen(self.theme.color("border"), 1))
        painter.setBrush(QColor(swatch.color))
        painter.drawRoundedRect(box.adjusted(0.5, 0.5, -0.5, -0.5), 3, 3)
        self.draw_label(painter, x + scaled(SWATCH_SIZE) + scaled(GAP), line, swatch.label)
        return box

    def draw_scale(self, painter: QPainter, scale: Scale) -> None:
        stops, low, high = scale
        self.draw_label(painter, 0, 0, low)
        x = self._text_width(low) + scaled(GAP)
        ramp = QLinearGradient(x, 0, x + self._scale_width, 0)
        colors = stops(self.theme)
        for index, color in enumerate(colors):
            ramp.setColorAt(index / (len(colors) - 1), QColor(color))
        painter.setPen(QPen(self.theme.color("border"), 1))
        painter.setBrush(ramp)
        painter.drawRoundedRect(QRectF(x, self._bar_top, self._scale_width, scaled(_BAR_HEIGHT)), 3, 3)
        self.draw_label(painter, x + self._scale_width + scaled(GAP), 0, high)

    def draw_owners(self, painter: QPainter, x: int, label: str) -> None:
        painter.setPen(QPen(self.theme.color("border"), 0))
        for index, color in enumerate(owner_colors(self.theme)[:_NUM_OWNERS]):
            painter.setBrush(QColor(color))
            painter.drawRoundedRect(
                QRectF(x + index * scaled(_OWNER_STEP), self._bar_top, scaled(8), scaled(_BAR_HEIGHT)), 2, 2
            )
        self.draw_label(painter, x + _NUM_OWNERS * scaled(_OWNER_STEP) + scaled(GAP), 0, label)

    def draw_label(self, painter: QPainter, x: int, line: int, label: str) -> None:
        painter.setPen(self.theme.color("muted"))
        metrics, top = self.fontMetrics(), line * self.line_height
        painter.drawText(x, top + (self.line_height + metrics.ascent() - metrics.descent()) // 2, label)

    @property
    def _between(self) -> int:
        return scaled(self._between_at_100)

    @property
    def _scale_width(self) -> int:
        return scaled(self._scale_width_at_100)

    @property
    def _bar_top(self) -> float:
        return (self.line_height - scaled(_BAR_HEIGHT)) / 2

    def _text_width(self, text: str) -> int:
        return self.fontMetrics().horizontalAdvance(text)
