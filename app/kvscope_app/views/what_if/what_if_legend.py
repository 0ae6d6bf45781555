"""Legend of the small maps: swatches with labels, wrapped to as many lines as they need."""

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
_SPACING: Final = 16


class WhatIfLegend(QWidget):
    def __init__(self) -> None:
        super().__init__()
        self._theme = DARK
        self._page_bytes = PAGE_BYTES
        self._has_unread = False
        policy = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self._update_name()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self.update()

    def show_kinds(self, *, page_bytes: int, has_unread: bool) -> None:
        if (page_bytes, has_unread) != (self._page_bytes, self._has_unread):
            self._page_bytes, self._has_unread = page_bytes, has_unread
            self._update_name()
            self.updateGeometry()
            self.update()

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        return max(position.y() for position, _, _ in self._positions(width)) + self._line_height()

    def sizeHint(self) -> QSize:
        return QSize(200, self.heightForWidth(max(200, self.width())))

    def minimumSizeHint(self) -> QSize:
        return QSize(80, self._line_height())

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        metrics, height, swatch = self.fontMetrics(), self._line_height(), scaled(_SWATCH)
        for position, color, text in self._positions(self.width()):
            top = position.y() + (height - swatch) / 2
            if color:
                painter.setPen(QPen(self._theme.color("border"), 1))
                painter.setBrush(QColor(color))
                painter.drawRoundedRect(QRectF(position.x() + 0.5, top + 0.5, swatch - 1, swatch - 1), 3, 3)
            painter.setPen(self._theme.color("muted"))
            baseline = position.y() + (height + metrics.ascent() - metrics.descent()) // 2
            painter.drawText(position.x() + _swatch_width(color), baseline, text)
        painter.end()

    def _positions(self, width: int) -> Iterator[tuple[QPoint, str, str]]:
        x = y = 0
        for color, text in [*legend(self._theme, has_unread=self._has_unread), ("", page_note(self._page_bytes))]:
            entry_width = _swatch_width(color) + self.fontMetrics().horizontalAdvance(text)
            if x and x + entry_width > width:
                x, y = 0, y + self._line_height()
            yield QPoint(x, y), color, text
            x += entry_width + scaled(_SPACING)

    def _update_name(self) -> None:
        self.setAccessibleName("Colours: " + ", ".join(text for _, text in legend(DARK, has_unread=self._has_unread)))

    def _line_height(self) -> int:
        return self.fontMetrics().height() + 4


def _swatch_width(color: str) -> int:
    return scaled(_SWATCH + _GAP) if color else 0
