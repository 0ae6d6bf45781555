"""What the colours of the page map mean: swatches, or a colour scale with words at its ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from PySide6.QtCore import QRectF, QSize
from PySide6.QtGui import QColor, QLinearGradient, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QWidget

from kvscope_app.theme import DARK, Theme, mix, owner_colors
from kvscope_app.views.page_map.color_modes import ColorMode
from kvscope_app.views.page_map.ink import age_stops, fill_stops, sharing_stops

_SWATCH: Final = 11
_GAP: Final = 6
_BETWEEN: Final = 16
_SCALE_WIDTH: Final = 120

Swatches = list[tuple[str, str]]
"""(colour, word)."""
Scale = tuple[tuple[str, ...], str, str]
"""Stops, the word at the low end, the word at the high end."""

_SCALES: Final[dict[ColorMode, tuple[Callable[[Theme], tuple[str, ...]], str, str]]] = {
    ColorMode.FILL: (fill_stops, "full", "empty slots"),
    ColorMode.SHARING: (sharing_stops, "1 request", "16 or more"),
    ColorMode.AGE: (age_stops, "long unused", "used now"),
}


class Legend(QWidget):
    """One line; what does not fit is left out at the end."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = DARK
        self._mode = ColorMode.STATE
        self._tiers = False
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self._describe()

    def show_mode(self, mode: ColorMode, theme: Theme, tiers: bool) -> None:
        """Explain `mode`; `tiers`: some blocks are in host memory or on disk."""
        self._mode, self._theme, self._tiers = mode, theme, tiers
        self._describe()
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(200, self.fontMetrics().height() + 6)

    def minimumSizeHint(self) -> QSize:
        return QSize(60, self.fontMetrics().height() + 6)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        x = 0.0
        if self._mode in _SCALES:
            x = self._draw_scale(painter, x)
        for color, word in swatches(self._mode, self._theme, self._tiers):
            x = self._draw_swatch(painter, x, color, word)
        if self._mode is ColorMode.OWNER:
            self._draw_owners(painter, x)
        painter.end()

    def _draw_swatch(self, painter: QPainter, x: float, color: str, word: str) -> float:
        width = _SWATCH + _GAP + self.fontMetrics().horizontalAdvance(word)
        if x + width > self.width():
            return float(self.width())
        top = (self.height() - _SWATCH) / 2
        painter.setPen(QPen(self._theme.color("border"), 1))
        painter.setBrush(QColor(color))
        painter.drawRoundedRect(QRectF(x + 0.5, top + 0.5, _SWATCH - 1, _SWATCH - 1), 3, 3)
        if word == "shared":  # as in the cells: the mark says it without colour
            painter.fillRect(QRectF(x + _SWATCH - 5, top + 2, 3, 3), self._theme.color("selection"))
        self._draw_word(painter, x + _SWATCH + _GAP, word)
        return x + width + _BETWEEN

    def _draw_scale(self, painter: QPainter, x: float) -> float:
        stops, low, high = _SCALES[self._mode]
        x = self._draw_word(painter, x, low) + _GAP
        ramp = QLinearGradient(x, 0, x + _SCALE_WIDTH, 0)
        colors = stops(self._theme)
        for index, color in enumerate(colors):
            ramp.setColorAt(index / (len(colors) - 1), QColor(color))
        painter.setPen(QPen(self._theme.color("border"), 1))
        painter.setBrush(ramp)
        painter.drawRoundedRect(QRectF(x, (self.height() - 9) / 2, _SCALE_WIDTH, 9), 3, 3)
        return self._draw_word(painter, x + _SCALE_WIDTH + _GAP, high) + _BETWEEN

    def _draw_owners(self, painter: QPainter, x: float) -> None:
        word = "each request its own colour, dimmer when only cached"
        if x + 60 + self.fontMetrics().horizontalAdvance(word) > self.width():
            return
        painter.setPen(QPen(self._theme.color("border"), 0))
        for index, color in enumerate(owner_colors(self._theme)[:5]):
            painter.setBrush(QColor(color))
            painter.drawRoundedRect(QRectF(x + index * 9, (self.height() - 9) / 2, 8, 9), 2, 2)
        self._draw_word(painter, x + 5 * 9 + _GAP, word)

    def _draw_word(self, painter: QPainter, x: float, word: str) -> float:
        painter.setPen(self._theme.color("muted"))
        metrics = self.fontMetrics()
        painter.drawText(int(x), (self.height() + metrics.ascent() - metrics.descent()) // 2, word)
        return x + metrics.horizontalAdvance(word)

    def _describe(self) -> None:
        words = [word for _, word in swatches(self._mode, self._theme, self._tiers)]
        if self._mode in _SCALES:
            words = [f"from {_SCALES[self._mode][1]} to {_SCALES[self._mode][2]}", *words]
        self.setAccessibleName(f"Colours show {self._mode}: {', '.join(words)}")


def swatches(mode: ColorMode, theme: Theme, tiers: bool) -> Swatches:
    """The single colours of a mode."""
    free = (theme.block_free, "free")
    if mode is ColorMode.STATE:
        told = [
            (theme.block_active, "active"),
            (theme.block_shared, "shared"),
            (theme.block_cached, "cached"),
            free,
        ]
        return told + ([(theme.block_host, "host memory"), (theme.block_disk, "disk")] if tiers else [])
    if mode is ColorMode.SHARING:
        return [(mix(theme.block_cached, theme.block_free, 0.62), "cached, held by none"), free]
    return [free]
