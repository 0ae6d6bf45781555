"""What the heatmap's colours mean, in the words of the page map's legend."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QPointF, QRectF, QSize
from PySide6.QtGui import QColor, QLinearGradient, QPainter, QPaintEvent, QPen, QResizeEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from kvscope_app.look.theme import DARK, Theme, owner_colors
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
GAP_WORD: Final = "nothing recorded"
_OWNERS_WORD: Final = "each request its own colour"


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
    """One line, two where there is height; what does not fit is in the tooltip."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme, self._mode = DARK, HeatMode.STATE
        self._swatches: list[Swatch] = []
        self._has_gaps, self._is_low = False, False
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def show_mode(self, mode: HeatMode, theme: Theme, shown: Shown, device: DeviceInfo, *, gaps: bool) -> None:
        """Explain `mode`; `gaps`: there are seconds of which nothing is known."""
        self._mode, self._theme, self._has_gaps = mode, theme, gaps
        self._swatches = heat_swatches(mode, theme, shown, device)
        if gaps:
            self._swatches.append(Swatch(theme.base, GAP_WORD))
        self.setToolTip(self._words())
        self.setAccessibleName(f"Colours show {mode}. {self._words()}")
        self.updateGeometry()
        self.update()

    def set_low(self, is_low: bool) -> None:
        """Whether the map needs the height more."""
        if is_low != self._is_low:
            self._is_low = is_low
            self.updateGeometry()

    def sizeHint(self) -> QSize:
        return QSize(200, self._num_lines * self._line_height + 2)

    def minimumSizeHint(self) -> QSize:
        return QSize(60, self.sizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.updateGeometry()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if self._mode is HeatMode.USED:
            self._draw_scale(painter)
        if self._mode is HeatMode.OWNER:
            self._draw_owners(painter)
        for swatch, x, line in self._placed():
            if line < self._num_lines:
                self._draw_swatch(painter, x, line * self._line_height, swatch)
        painter.end()

    @property
    def _line_height(self) -> int:
        return self.fontMetrics().height() + 4

    @property
    def _num_lines(self) -> int:
        return 1 if self._is_low else min(max((line for *_, line in self._placed()), default=0) + 1, 2)

    def _placed(self) -> list[tuple[Swatch, int, int]]:
        """Each swatch with its left edge and its line."""
        x, line, placed = self._begin(), 0, []
        for swatch in self._swatches:
            width = _SWATCH + _GAP + self.fontMetrics().horizontalAdvance(swatch.word)
            if x > 0 and x + width > self.width():
                x, line = 0, line + 1
            placed.append((swatch, x, line))
            x += width + _BETWEEN
        return placed

    def _begin(self) -> int:
        """Where the swatches begin: after the scale, or the owners."""
        advance = self.fontMetrics().horizontalAdvance
        if self._mode is HeatMode.USED:
            _, low, high = SCALES[ColorMode.FILL]
            return advance(low) + advance(high) + _SCALE_WIDTH + 2 * _GAP + _BETWEEN
        return advance(_OWNERS_WORD) + 5 * 9 + _GAP + _BETWEEN if self._mode is HeatMode.OWNER else 0

    def _words(self) -> str:
        words = [swatch.word for swatch in self._swatches]
        if self._mode is HeatMode.USED:
            words.insert(0, "blocks in use, from full to empty slots")
        if self._mode is HeatMode.OWNER:
            words.insert(0, f"{_OWNERS_WORD} (of several in a row, the newest)")
        strong = "" if self._mode in (HeatMode.USED, HeatMode.OWNER) else " The fewer blocks of a row, the fainter."
        return f"Colours: {', '.join(words)}.{strong}"

    def _draw_swatch(self, painter: QPainter, x: int, top: int, swatch: Swatch) -> None:
        y = top + (self._line_height - _SWATCH) / 2
        painter.setPen(QPen(self._theme.color("border"), 1))
        painter.setBrush(QColor(swatch.color))
        painter.drawRoundedRect(QRectF(x + 0.5, y + 0.5, _SWATCH - 1, _SWATCH - 1), 3, 3)
        if swatch.word == GAP_WORD:
            painter.setPen(QPen(self._theme.color("muted"), 1))
            for left, right in ((2, 6), (5, 9)):
                painter.drawLine(QPointF(x + left, y + 9), QPointF(x + right, y + 2))
        self._draw_word(painter, x + _SWATCH + _GAP, top, swatch.word)

    def _draw_scale(self, painter: QPainter) -> None:
        stops, low, high = SCALES[ColorMode.FILL]
        self._draw_word(painter, 0, 0, low)
        x = self.fontMetrics().horizontalAdvance(low) + _GAP
        ramp = QLinearGradient(x, 0, x + _SCALE_WIDTH, 0)
        colors = stops(self._theme)
        for index, color in enumerate(colors):
            ramp.setColorAt(index / (len(colors) - 1), QColor(color))
        painter.setPen(QPen(self._theme.color("border"), 1))
        painter.setBrush(ramp)
        painter.drawRoundedRect(QRectF(x, (self._line_height - 9) / 2, _SCALE_WIDTH, 9), 3, 3)
        self._draw_word(painter, x + _SCALE_WIDTH + _GAP, 0, high)

    def _draw_owners(self, painter: QPainter) -> None:
        painter.setPen(QPen(self._theme.color("border"), 0))
        for index, color in enumerate(owner_colors(self._theme)[:5]):
            painter.setBrush(QColor(color))
            painter.drawRoundedRect(QRectF(index * 9, (self._line_height - 9) / 2, 8, 9), 2, 2)
        self._draw_word(painter, 5 * 9 + _GAP, 0, _OWNERS_WORD)

    def _draw_word(self, painter: QPainter, x: int, top: int, word: str) -> None:
        painter.setPen(self._theme.color("muted"))
        metrics = self.fontMetrics()
        painter.drawText(x, top + (self._line_height + metrics.ascent() - metrics.descent()) // 2, word)
