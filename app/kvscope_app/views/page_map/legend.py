"""What the colours of the page map mean: swatches, or a colour scale with words at its ends; then the flashes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from PySide6.QtCore import QRectF, QSize
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from kvscope_app.look.theme import DARK, Theme
from kvscope_app.views.page_map.color_modes import ColorMode
from kvscope_app.views.page_map.drawing.flash_glyphs import glyph
from kvscope_app.views.page_map.drawing.flash_kinds import FlashKind
from kvscope_app.views.page_map.drawing.ink import sign_color
from kvscope_app.views.page_map.legend_ink import LegendInk, Placed
from kvscope_app.views.page_map.legend_items import FLASH_MEANINGS, SCALES, Shown, Swatch, swatches

_BETWEEN: Final = 16
_SCALE_WIDTH: Final = 120
_MAX_LINES: Final = 2
_OWNERS_WORD: Final = "each request its own colour, dimmer when only cached"


class Legend(QWidget):
    """One line, two where tiers and flashes are to be explained; what does not fit is left to the tooltip."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._ink = LegendInk(self, between=_BETWEEN, scale_width=_SCALE_WIDTH)
        self._theme = DARK
        self._mode = ColorMode.STATE
        self._shown = Shown()
        self._num_lines = 1
        self._is_low = False
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self._describe()

    def show_mode(self, mode: ColorMode, theme: Theme, shown: Shown) -> None:
        """Explain `mode` and what else there is."""
        if (mode, theme, shown) == (self._mode, self._theme, self._shown):
            return
        self._mode, self._theme, self._shown = mode, theme, shown
        self._describe()
        self._take_lines()
        self.update()

    def set_low(self, is_low: bool) -> None:
        """Whether the map needs the height more: one line then."""
        self._is_low = is_low
        self._take_lines()

    def sizeHint(self) -> QSize:
        return QSize(200, self._num_lines * self._ink.line_height + 2)

    def minimumSizeHint(self) -> QSize:
        return QSize(60, self.sizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._take_lines()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if self._mode in SCALES:
            self._ink.draw_scale(painter, self._theme, SCALES[self._mode])
        right = self._begin
        for placed in self._placed():
            swatch, x, line = placed
            if line < self._num_lines:
                self._draw_swatch(painter, placed)
                right = x + self._ink.swatch_width(swatch) + _BETWEEN
        has_room = right + self._ink.owners_width(_OWNERS_WORD) <= self.width() + _BETWEEN
        if self._mode is ColorMode.OWNER and self._shown.is_plain and has_room:
            self._ink.draw_owners(painter, self._theme, right, _OWNERS_WORD)
        painter.end()

    def _take_lines(self) -> None:
        """As many lines as it takes at this width."""
        last = max((line for *_, line in self._placed()), default=0)
        num_lines = 1 if self._shown.is_plain or self._is_low else min(last + 1, _MAX_LINES)
        if num_lines != self._num_lines:
            self._num_lines = num_lines
            self.updateGeometry()

    def _placed(self) -> Iterator[Placed]:
        return self._ink.placed(swatches(self._mode, self._theme, self._shown), self._begin)

    @property
    def _begin(self) -> int:
        """Where the swatches begin: after the scale."""
        return self._ink.scale_width(SCALES[self._mode]) if self._mode in SCALES else 0

    def _draw_swatch(self, painter: QPainter, placed: Placed) -> None:
        swatch, *_ = placed
        box = self._ink.draw_swatch(painter, self._theme, placed)
        if swatch.word == "shared":  # as in the cells: the mark says it without colour
            painter.fillRect(QRectF(box.right() - 5, box.top() + 2, 3, 3), self._theme.color("selection"))
        if swatch.flash is not None:
            self._draw_glyph(painter, box, swatch.flash)

    def _draw_glyph(self, painter: QPainter, box: QRectF, flash: FlashKind) -> None:
        sign = glyph(flash, 5)
        ink = QColor(sign_color(flash, self._theme))
        for y, x in zip(*(axis.tolist() for axis in sign.nonzero()), strict=True):
            painter.fillRect(QRectF(box.x() + 3 + x, box.y() + 3 + y, 1, 1), ink)

    def _describe(self) -> None:
        told = swatches(self._mode, self._theme, self._shown)
        words = [f"flash: {s.word}" if s.flash is not None else s.word for s in told]
        if self._mode in SCALES:
            words = [f"from {SCALES[self._mode][1]} to {SCALES[self._mode][2]}", *words]
        self.setAccessibleName(f"Colours show {self._mode}: {', '.join(words)}")
        self.setToolTip("" if self._shown.is_plain else _explained(told))


def _explained(told: list[Swatch]) -> str:
    """All of it, also what found no room."""
    colors = ", ".join(s.word for s in told if s.flash is None)
    flashes = [f"{s.word}: {FLASH_MEANINGS[s.flash]}" for s in told if s.flash is not None]
    lights = ["A cell lights up for a moment when its block was", *flashes] if flashes else []
    return "\n".join([f"Colours: {colors}.", *lights])
