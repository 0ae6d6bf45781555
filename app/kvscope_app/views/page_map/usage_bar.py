"""Bar above the page map that shows how much of the pool is in use."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QBrush, QPainter, QPainterPath, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from kvscope_app.ui.number_text import percent
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.zoom import scaled

_HEIGHT: Final = 7


class UsageBar(QWidget):
    """Bar with the shares of active (including shared), cached and free blocks, or of the blocks in use."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = DARK
        self._counts = (0, 0, 0)
        self._used_share: float | None = None
        """Share of blocks in use, as reported by an engine that does not report block counts. Below 0 if unknown; None
        if block counts are shown instead.
        """
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setFixedHeight(scaled(_HEIGHT))

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self.update()

    def show_counts(self, active: int, cached: int, free: int) -> None:
        if (active, cached, free) == self._counts and self._used_share is None:
            return
        self._used_share = None
        self._counts = (active, cached, free)
        total = max(1, active + cached + free)
        self.setToolTip(
            f"{percent(active / total)} active, {percent(cached / total)} cached, {percent(free / total)} free"
        )
        self.setAccessibleName(self.toolTip())
        self.update()

    def show_share(self, used_share: float) -> None:
        """Show only the share of blocks in use, for an engine that does not distinguish cached and free blocks. A value
        below 0 means unknown.
        """
        if used_share == self._used_share:
            return
        self._used_share = used_share
        text = f"{percent(used_share)} in use, the rest cached or free"
        self.setToolTip(text if used_share >= 0 else "Pool usage is unknown")
        self.setAccessibleName(self.toolTip())
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(200, scaled(_HEIGHT))

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        outline = QPainterPath()
        outline.addRoundedRect(QRectF(self.rect()), self.height() / 2, self.height() / 2)
        painter.setClipPath(outline)
        painter.fillRect(self.rect(), self._theme.color("block_free"))
        if self._used_share is not None:
            self._draw_share(painter, max(self._used_share, 0.0))
            return
        total, x = max(1, sum(self._counts)), 0.0
        for name, num_blocks in zip(("block_active", "block_cached"), self._counts, strict=False):
            width = self.width() * num_blocks / total
            width = max(width, 2.0) if num_blocks else 0.0  # keeps a single block visible
            painter.fillRect(QRectF(x, 0, width, self.height()), self._theme.color(name))
            x += width
        painter.end()

    def _draw_share(self, painter: QPainter, share: float) -> None:
        width = self.width() * share
        painter.fillRect(QRectF(0, 0, width, self.height()), self._theme.color("block_active"))
        hatch = QBrush(self._theme.color("muted"), Qt.BrushStyle.BDiagPattern)
        painter.fillRect(QRectF(width, 0, self.width() - width, self.height()), hatch)
        painter.end()
