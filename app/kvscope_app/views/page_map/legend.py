"""What the colours of the page map mean: swatches, or a colour scale with words at its ends; then the flashes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QLinearGradient, QPainter, QPaintEvent, QPen, QResizeEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from kvscope_app.look.theme import DARK, Theme, owner_colors
from kvscope_app.views.page_map.color_modes import ColorMode
from kvscope_app.views.page_map.drawing.flash_glyphs import glyph
from kvscope_app.views.page_map.drawing.ink import sign_color
from kvscope_app.views.page_map.legend_items import FLASH_MEANINGS, SCALES, Shown, Swatch, swatches

_SWATCH: Final = 11
_GAP: Final = 6
_BETWEEN: Final = 16
_SCALE_WIDTH: Final = 120
_MAX_LINES: Final = 3
_OWNERS_WORD: Final = "each request its own colour, dimmer when only cached"


class Legend(QWidget):
    """One line, up to three where tiers and flashes are to be explained. Of what does not fit it says how much that is,
    and the tooltip says all."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
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
        return QSize(200, self._num_lines * self._line_height + 2)

    def minimumSizeHint(self) -> QSize:
        return QSize(60, self.sizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._take_lines()
        self._describe()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if self._mode in SCALES:
            self._draw_scale(painter)
        fitting = self.fitting
        for swatch, x, line in fitting:
            self._draw_swatch(painter, QPointF(x, line * self._line_height), swatch)
        x = self._after(fitting)
        if words := self.more_words:
            self._draw_word(painter, x, words, (self._num_lines - 1) * self._line_height)
        if self._mode is ColorMode.OWNER and self._shown.is_plain:
            self._draw_owners(painter, x)
        painter.end()

    @property
    def fitting(self) -> list[tuple[Swatch, float, int]]:
        """The swatches that are shown, each with its left edge and its line."""
        placed = list(self._placed())
        shown = [place for place in placed if place[2] < self._num_lines]
        while shown and len(shown) < len(placed):
            words = self.fontMetrics().horizontalAdvance(_more(len(placed) - len(shown)))
            if self._after(shown) + words <= self.width() or self._after(shown) == 0:
                break
            shown.pop()
        return shown

    @property
    def more_words(self) -> str:
        """What is said of those that do not fit; nothing where all do."""
        num_hidden = sum(1 for _ in self._placed()) - len(self.fitting)
        return _more(num_hidden) if num_hidden else ""

    def _after(self, shown: list[tuple[Swatch, float, int]]) -> float:
        """Where the last line goes on."""
        if not shown:
            return self._begin()
        swatch, x, line = shown[-1]
        return x + self._width(swatch) + _BETWEEN if line == self._num_lines - 1 else 0.0

    @property
    def _line_height(self) -> int:
        return self.fontMetrics().height() + 4

    def _take_lines(self) -> None:
        """As many lines as it takes at this width."""
        last = max((line for *_, line in self._placed()), default=0)
        num_lines = 1 if self._shown.is_plain or self._is_low else min(last + 1, _MAX_LINES)
        if num_lines != self._num_lines:
            self._num_lines = num_lines
            self.updateGeometry()

    def _placed(self) -> Iterator[tuple[Swatch, float, int]]:
        """Each swatch with its left edge and its line."""
        x, line = self._begin(), 0
        for swatch in swatches(self._mode, self._theme, self._shown):
            if x > 0 and x + self._width(swatch) > self.width():
                x, line = 0.0, line + 1
            yield swatch, x, line
            x += self._width(swatch) + _BETWEEN

    def _begin(self) -> float:
        if self._mode not in SCALES:
            return 0.0
        _, low, high = SCALES[self._mode]
        metrics = self.fontMetrics()
        return metrics.horizontalAdvance(low) + metrics.horizontalAdvance(high) + _SCALE_WIDTH + 2 * _GAP + _BETWEEN

    def _width(self, swatch: Swatch) -> float:
        return _SWATCH + _GAP + self.fontMetrics().horizontalAdvance(swatch.word)

    def _draw_swatch(self, painter: QPainter, at: QPointF, swatch: Swatch) -> None:
        top = at.y() + (self._line_height - _SWATCH) / 2
        painter.setPen(QPen(self._theme.color("border"), 1))
        painter.setBrush(QColor(swatch.color))
        painter.drawRoundedRect(QRectF(at.x() + 0.5, top + 0.5, _SWATCH - 1, _SWATCH - 1), 3, 3)
        if swatch.word == "shared":  # as in the cells: the mark says it without colour
            painter.fillRect(QRectF(at.x() + _SWATCH - 5, top + 2, 3, 3), self._theme.color("selection"))
        if swatch.flash is not None:
            self._draw_glyph(painter, QPointF(at.x(), top), swatch)
        self._draw_word(painter, at.x() + _SWATCH + _GAP, swatch.word, at.y())

    def _draw_glyph(self, painter: QPainter, at: QPointF, swatch: Swatch) -> None:
        assert swatch.flash is not None, "the swatch of a flash"
        sign = glyph(swatch.flash, 5)
        ink = QColor(sign_color(swatch.flash, self._theme))
        for y, x in zip(*(axis.tolist() for axis in sign.nonzero()), strict=True):
            painter.fillRect(QRectF(at.x() + 3 + x, at.y() + 3 + y, 1, 1), ink)

    def _draw_scale(self, painter: QPainter) -> None:
        stops, low, high = SCALES[self._mode]
        x = self._draw_word(painter, 0, low) + _GAP
        ramp = QLinearGradient(x, 0, x + _SCALE_WIDTH, 0)
        colors = stops(self._theme)
        for index, color in enumerate(colors):
            ramp.setColorAt(index / (len(colors) - 1), QColor(color))
        painter.setPen(QPen(self._theme.color("border"), 1))
        painter.setBrush(ramp)
        painter.drawRoundedRect(QRectF(x, (self._line_height - 9) / 2, _SCALE_WIDTH, 9), 3, 3)
        self._draw_word(painter, x + _SCALE_WIDTH + _GAP, high)

    def _draw_owners(self, painter: QPainter, x: float) -> None:
        room = int(self.width() - x - 5 * 9 - _GAP)
        words = self.fontMetrics().elidedText(_OWNERS_WORD, Qt.TextElideMode.ElideRight, room)
        painter.setPen(QPen(self._theme.color("border"), 0))
        for index, color in enumerate(owner_colors(self._theme)[:5]):
            painter.setBrush(QColor(color))
            painter.drawRoundedRect(QRectF(x + index * 9, (self._line_height - 9) / 2, 8, 9), 2, 2)
        self._draw_word(painter, x + 5 * 9 + _GAP, words)

    def _draw_word(self, painter: QPainter, x: float, word: str, top: float = 0.0) -> float:
        painter.setPen(self._theme.color("muted"))
        metrics = self.fontMetrics()
        painter.drawText(int(x), int(top) + (self._line_height + metrics.ascent() - metrics.descent()) // 2, word)
        return x + metrics.horizontalAdvance(word)

    def _describe(self) -> None:
        told = swatches(self._mode, self._theme, self._shown)
        words = [f"flash: {s.word}" if s.flash is not None else s.word for s in told]
        if self._mode in SCALES:
            words = [f"from {SCALES[self._mode][1]} to {SCALES[self._mode][2]}", *words]
        self.setAccessibleName(f"Colours show {self._mode}: {', '.join(words)}")
        plain = _OWNERS_WORD if self._mode is ColorMode.OWNER else ""
        self.setToolTip(plain if self._shown.is_plain and not self.more_words else _explained(told))


def _more(num_hidden: int) -> str:
    return f"+{num_hidden} more"


def _explained(told: list[Swatch]) -> str:
    """All of it, also what found no room."""
    colors = ", ".join(s.word for s in told if s.flash is None)
    flashes = [f"{s.word}: {FLASH_MEANINGS[s.flash]}" for s in told if s.flash is not None]
    lights = ["A cell lights up for a moment when its block was", *flashes] if flashes else []
    return "\n".join([f"Colours: {colors}.", *lights])
