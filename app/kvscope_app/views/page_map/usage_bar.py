"""The three-way bar that answers "how full is it": active, cached, free (shared is part of active)."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QRectF, QSize
from PySide6.QtGui import QPainter, QPainterPath, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from kvscope_app.look.number_text import percent
from kvscope_app.look.theme import DARK, Theme
from kvscope_app.look.zoom import scaled

_HEIGHT: Final = 7


class UsageBar(QWidget):
    """Shares of the block pool."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = DARK
        self._counts = (0, 0, 0)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setFixedHeight(scaled(_HEIGHT))

    def apply_theme(self, theme: Theme) -> None:
        """Take the colours of `theme`."""
        self._theme = theme
        self.update()

    def show_counts(self, active: int, cached: int, free: int) -> None:
        """Show these numbers of blocks."""
        if (active, cached, free) == self._counts:
            return
        self._counts = (active, cached, free)
        total = max(1, active + cached + free)
        self.setToolTip(
            f"{percent(active / total)} active, {percent(cached / total)} cached, {percent(free / total)} free"
        )
        self.setAccessibleName(self.toolTip())
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(200, _HEIGHT)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        outline = QPainterPath()
        outline.addRoundedRect(QRectF(self.rect()), _HEIGHT / 2, _HEIGHT / 2)
        painter.setClipPath(outline)
        painter.fillRect(self.rect(), self._theme.color("block_free"))
        total, x = max(1, sum(self._counts)), 0.0
        for name, count in zip(("block_active", "block_cached"), self._counts, strict=False):
            width = self.width() * count / total
            width = max(width, 2.0) if count else 0.0  # a single block is seen too
            painter.fillRect(QRectF(x, 0, width, _HEIGHT), self._theme.color(name))
            x += width
        painter.end()
