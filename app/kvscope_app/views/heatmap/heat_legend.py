"""What the heatmap's colours mean, in the words of the page map's legend."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QRectF, QSize
from PySide6.QtGui import QColor, QLinearGradient, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QWidget

from kvscope_app.look.theme import DARK, Theme, mix, owner_colors
from kvscope_app.views.heatmap.cell_keys import HeatMode, tier_colors, unheld_color
from kvscope_app.views.page_map.color_modes import ColorMode
from kvscope_app.views.page_map.legend_items import SCALES, Shown, Swatch, swatches
from kvscope_app.views.places import tier_title
from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.messages.telemetry import DeviceInfo

_SWATCH: Final = 11
_GAP: Final = 6
_BETWEEN: Final = 14
_SCALE_WIDTH: Final = 90
_NOT_DRAWN: Final = ("held, empty", "no memory behind it")
"""What the bins of a course do not tell."""
_GAP_WORD: Final = "nothing recorded"


def heat_swatches(mode: HeatMode, theme: Theme, shown: Shown, device: DeviceInfo) -> list[Swatch]:
    """The single colours of `mode`."""
    if mode is HeatMode.STATE:
        return [swatch for swatch in swatches(ColorMode.STATE, theme, shown) if swatch.word not in _NOT_DRAWN]
    free = Swatch(theme.block_free, "free")
    if mode is HeatMode.USED:
        return [free]
    if mode is HeatMode.OWNER:
        return [Swatch(unheld_color(theme), "cached, held by none"), free]
    tiers = [tier for tier in (Tier.HBM, Tier.HOST, Tier.DISK) if tier is Tier.HBM or tier in shown.tiers]
    return [*(Swatch(tier_colors(theme)[tier], tier_title(tier, device)) for tier in tiers), free]


class HeatLegend(QWidget):
    """One line; what does not fit is in the tooltip."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme, self._mode = DARK, HeatMode.STATE
        self._swatches: list[Swatch] = []
        self._has_gaps = False
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def show_mode(self, mode: HeatMode, theme: Theme, shown: Shown, device: DeviceInfo, *, gaps: bool) -> None:
        """Explain `mode`; `gaps`: there are seconds of which nothing is known."""
        self._mode, self._theme, self._has_gaps = mode, theme, gaps
        self._swatches = heat_swatches(mode, theme, shown, device)
        self.setToolTip(self._words())
        self.setAccessibleName(f"Colours show {mode}. {self._words()}")
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(200, self.fontMetrics().height() + 6)

    def minimumSizeHint(self) -> QSize:
        return QSize(60, self.sizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        x = self._draw_scale(painter) if self._mode is HeatMode.USED else 0.0
        if self._mode is HeatMode.OWNER:
            x = self._draw_owners(painter)
        for swatch in self._swatches:
            painter.setBrush(QColor(swatch.color))
            x = self._draw_swatch(painter, x, swatch.word)
        if self._has_gaps:
            painter.setBrush(self._theme.color("base"))
            at = x
            x = self._draw_swatch(painter, x, _GAP_WORD)
            painter.setPen(QPen(QColor(mix(self._theme.base, self._theme.muted, 0.5)), 1))
            top = (self.height() - _SWATCH) / 2
            for shift in (3, 7, 11):
                painter.drawLine(int(at + shift), int(top + 1), int(at + max(shift - 8, 1)), int(top + min(shift, 9)))
        painter.end()

    def _words(self) -> str:
        words = [swatch.word for swatch in self._swatches]
        if self._mode is HeatMode.USED:
            words.insert(0, "blocks in use, from full to empty slots")
        if self._mode is HeatMode.OWNER:
            words.insert(0, "each request its own colour (the newest of a row's blocks)")
        if self._has_gaps:
            words.append(f"hatched: {_GAP_WORD}")
        strong = "" if self._mode in (HeatMode.USED, HeatMode.OWNER) else " The fewer blocks of a row, the fainter."
        return f"Colours: {', '.join(words)}.{strong}"

    def _draw_swatch(self, painter: QPainter, x: float, word: str) -> float:
        painter.setPen(QPen(self._theme.color("border"), 1))
        top = (self.height() - _SWATCH) / 2
        painter.drawRoundedRect(QRectF(x + 0.5, top + 0.5, _SWATCH - 1, _SWATCH - 1), 3, 3)
        return self._draw_word(painter, x + _SWATCH + _GAP, word) + _BETWEEN

    def _draw_scale(self, painter: QPainter) -> float:
        stops, low, high = SCALES[ColorMode.FILL]
        x = self._draw_word(painter, 0, low) + _GAP
        ramp = QLinearGradient(x, 0, x + _SCALE_WIDTH, 0)
        colors = stops(self._theme)
        for index, color in enumerate(colors):
            ramp.setColorAt(index / (len(colors) - 1), QColor(color))
        painter.setPen(QPen(self._theme.color("border"), 1))
        painter.setBrush(ramp)
        painter.drawRoundedRect(QRectF(x, (self.height() - 9) / 2, _SCALE_WIDTH, 9), 3, 3)
        return self._draw_word(painter, x + _SCALE_WIDTH + _GAP, high) + _BETWEEN

    def _draw_owners(self, painter: QPainter) -> float:
        painter.setPen(QPen(self._theme.color("border"), 0))
        for index, color in enumerate(owner_colors(self._theme)[:5]):
            painter.setBrush(QColor(color))
            painter.drawRoundedRect(QRectF(index * 9, (self.height() - 9) / 2, 8, 9), 2, 2)
        return self._draw_word(painter, 5 * 9 + _GAP, "each request its own colour") + _BETWEEN

    def _draw_word(self, painter: QPainter, x: float, word: str) -> float:
        painter.setPen(self._theme.color("muted"))
        metrics = self.fontMetrics()
        painter.drawText(int(x), (self.height() + metrics.ascent() - metrics.descent()) // 2, word)
        return x + metrics.horizontalAdvance(word)
