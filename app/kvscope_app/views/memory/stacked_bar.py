"""Horizontal bar of stacked segments, and a colour swatch. Must not depend on what the segments represent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QEvent, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QHelpEvent, QPainter, QPainterPath, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.zoom import scaled

BAR_HEIGHT = 30
_MIN_WIDTH = 2.0


@dataclass(frozen=True, slots=True)
class BarSegment:
    """Segment of a bar: share of the bar's length (0 to 1), colour `#rrggbb`, and tooltip."""

    share: float
    color: str
    text: str


class StackedBar(QWidget):
    def __init__(self) -> None:
        super().__init__()
        self._segments: tuple[BarSegment, ...] = ()
        self._background = QColor()
        self._line = QColor()
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def show_segments(self, segments: Sequence[BarSegment]) -> None:
        if tuple(segments) != self._segments:
            self._segments = tuple(segments)
            self.setAccessibleDescription("; ".join(segment.text for segment in segments))
            self.update()

    def set_colors(self, background: str, line: str) -> None:
        self._background, self._line = QColor(background), QColor(line)
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(240, BAR_HEIGHT)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        outline = QPainterPath()
        outline.addRoundedRect(QRectF(self.rect()), 6, 6)
        painter.setClipPath(outline)
        painter.fillRect(self.rect(), self._background)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing, False)
        for segment, box in self._boxes():
            painter.fillRect(box, QColor(segment.color))
            painter.fillRect(QRectF(box.right() - 1, 0, 1, box.height()), self._line)
        painter.end()

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            position = event.pos()
            text = next((s.text for s, box in self._boxes() if box.contains(position.toPointF())), "")
            QToolTip.showText(event.globalPos(), plain_tip(text), self)
            return True
        return super().event(event)

    def _boxes(self) -> list[tuple[BarSegment, QRectF]]:
        boxes, left = [], 0.0
        for segment in self._segments:
            width = max(segment.share * self.width(), _MIN_WIDTH) if segment.share > 0 else 0.0
            boxes.append((segment, QRectF(round(left), 0, round(left + width) - round(left), self.height())))
            left += width
        return boxes


class Swatch(QWidget):
    SIZE = 10

    def __init__(self) -> None:
        super().__init__()
        self._color = QColor()
        self.setFixedSize(scaled(self.SIZE), scaled(self.SIZE))

    def set_color(self, color: str) -> None:
        if QColor(color) != self._color:
            self._color = QColor(color)
            self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(self._color)
        painter.drawRoundedRect(self.rect(), 2, 2)
        painter.end()
