"""What the dots of a roofline mean: a sign and a word a kind of step. Owns no data."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent, QPolygonF
from PySide6.QtWidgets import QSizePolicy, QWidget

from kvscope_app.look.theme import DARK, Theme
from kvscope_app.look.zoom import scaled
from kvscope_app.views.roofline.points import Kind
from kvscope_app.views.roofline.words import KIND_COLORS, KIND_WORDS

_SIGN, _GAP, _APART = 8, 5, 14
_ORDER: Final = (Kind.DECODE, Kind.MIXED, Kind.PREFILL)


class RooflineLegend(QWidget):
    """Three signs on a line."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.theme: Theme = DARK
        self.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self.setAccessibleName("A circle is a decode step, a diamond a mixed one, a square a prefill")

    def apply_theme(self, theme: Theme) -> None:
        """Other colours."""
        self.theme = theme
        self.update()

    def sizeHint(self) -> QSize:
        metrics = self.fontMetrics()
        words = sum(metrics.horizontalAdvance(KIND_WORDS[kind]) for kind in _ORDER)
        return QSize(words + 3 * scaled(_SIGN + _GAP) + 2 * scaled(_APART) + 8, metrics.height() + 4)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        left, middle, size = 0.0, self.height() / 2, scaled(_SIGN)
        for kind in _ORDER:
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(self.theme.color(KIND_COLORS[kind]))
            box = QRectF(left, middle - size / 2, size, size)
            if kind is Kind.DECODE:
                painter.drawEllipse(box)
            elif kind is Kind.PREFILL:
                painter.drawRect(box)
            else:
                x, half = box.center().x(), size / 2
                corners = (QPointF(x, box.top()), QPointF(x + half, middle), QPointF(x, box.bottom()))
                painter.drawPolygon(QPolygonF([*corners, QPointF(x - half, middle)]))
            painter.setPen(self.theme.color("muted"))
            left += size + scaled(_GAP)
            words = KIND_WORDS[kind]
            width = painter.fontMetrics().horizontalAdvance(words)
            painter.drawText(QRectF(left, 0, width + 2, self.height()), Qt.AlignmentFlag.AlignVCenter, words)
            left += width + scaled(_APART)
        painter.end()
