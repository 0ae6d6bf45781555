"""Legend of the small maps: swatches with labels, on as many lines as they need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from PySide6.QtCore import QPoint, QRectF, QSize
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QWidget

from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.what_if.policy_text import legend, page_note
from kvscope_telemetry.messages.what_if import PAGE_BYTES

_SWATCH: Final = 11
_GAP: Final = 6
_BETWEEN: Final = 16


class WhatIfLegend(QWidget):
    def __init__(self) -> None:
        super().__init__()
        self._theme = DARK
        self._page_bytes = PAGE_BYTES
        self._has_unread = False
        policy = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self._name()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self.update()

    def show_kinds(self, *, page_bytes: int, has_unread: bool) -> None:
        """Set the page size of `virtual` in the note, and whether to include slots that are no longer read."""
        if (page_bytes, has_unread) != (self._page_bytes, self._has_unread):
            self._page_bytes, self._has_unread = page_bytes, has_unread
            self._name()
            self.updateGeometry()
            self.update()

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        return max(place.y() for place, _, _ in self._places(width)) + self._line_height()

    def sizeHint(self) -> QSize:
        return QSize(200, self.heightForWidth(max(200, self.width())))

    def minimumSizeHint(self) -> QSize:
        return QSize(80, self._line_height())

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        metrics, height, swatch = self.fontMetrics(), self._line_height(), scaled(_SWATCH)
        for place, color, word in self._places(self.width()):
            top = place.y() + (height - swatch) / 2
            if color:
                painter.setPen(QPen(self._theme.color("border"), 1))
                painter.setBrush(QColor(color))
                painter.drawRoundedRect(QRectF(place.x() + 0.5, top + 0.5, swatch - 1, swatch - 1), 3, 3)
            painter.setPen(self._theme.color("muted"))
            baseline = place.y() + (height + metrics.ascent() - metrics.descent()) // 2
            painter.drawText(place.x() + _swatch_width(color), baseline, word)
        painter.end()

    def _places(self, width: int) -> Iterator[tuple[QPoint, str, str]]:
        """Yield the position of each swatch, and of the note on pages, which has no colour."""
        x = y = 0
        for color, word in [*legend(self._theme, has_unread=self._has_unread), ("", page_note(self._page_bytes))]:
            wide = _swatch_width(color) + self.fontMetrics().horizontalAdvance(word)
            if x and x + wide > width:
                x, y = 0, y + self._line_height()
            yield QPoint(x, y), color, word
            x += wide + scaled(_BETWEEN)

    def _name(self) -> None:
        self.setAccessibleName("Colours: " + ", ".join(word for _, word in legend(DARK, has_unread=self._has_unread)))

    def _line_height(self) -> int:
        return self.fontMetrics().height() + 4


def _swatch_width(color: str) -> int:
    return scaled(_SWATCH + _GAP) if color else 0
