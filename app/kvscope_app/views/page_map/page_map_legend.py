"""Legend of the page map: the mode's swatches or colour scale, followed by marks and flashes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from PySide6.QtCore import QRectF, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QWidget

from kvscope_app.ui.theme import Theme
from kvscope_app.views.page_map.color_modes import STATE, ColorMode
from kvscope_app.views.page_map.drawing.flash_glyphs import glyph
from kvscope_app.views.page_map.drawing.flash_kinds import MOVES, FlashKind
from kvscope_app.views.page_map.drawing.pin_marks import draw_corner
from kvscope_app.views.page_map.drawing.pixel_tables import glyph_color
from kvscope_app.views.page_map.legend_items import FLASH_MEANINGS, LegendSwatch, ShownItems
from kvscope_app.views.page_map.swatch_legend import PlacedSwatch, SwatchLegend

_BETWEEN: Final = 16
_SCALE_WIDTH: Final = 120
_MAX_LINES: Final = 3
_OWNERS_LABEL: Final = "one colour per request, dimmer when only cached"


class PageMapLegend(SwatchLegend):
    """Legend of one to three lines. It has more than one line only if tiers or flashes need explanation.

    Swatches that do not fit are counted ("+2 more"); the tooltip explains all of them.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent, between=_BETWEEN, scale_width=_SCALE_WIDTH)
        self._mode = STATE
        self._shown = ShownItems()
        self._num_lines = 1
        self._is_low = False
        self._update_descriptions()

    def show_mode(self, mode: ColorMode, theme: Theme, shown: ShownItems) -> None:
        if (mode, theme, shown) == (self._mode, self.theme, self._shown):
            return
        self._mode, self.theme, self._shown = mode, theme, shown
        self._update_descriptions()
        self._update_num_lines()
        self.update()

    def set_low(self, is_low: bool) -> None:
        """Limit the legend to one line if `is_low`, to leave the height to the map."""
        self._is_low = is_low
        self._update_num_lines()

    @property
    def num_lines(self) -> int:
        return self._num_lines

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._update_num_lines()
        self._update_descriptions()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if (scale := self._mode.scale(self._shown)) is not None:
            self.draw_scale(painter, scale)
        fitting = self.fitting
        for placed in fitting:
            self._draw_swatch(painter, placed)
        right = self._next_x(fitting)
        if label := self.more_label:
            self.draw_label(painter, right, self._num_lines - 1, label)
        if self._mode.has_request_colors and self._shown.is_plain and not self._shown.owners:
            max_width = self.width() - right - self.owners_width("") + _BETWEEN
            label = self.fontMetrics().elidedText(_OWNERS_LABEL, Qt.TextElideMode.ElideRight, max_width)
            self.draw_owners(painter, right, label)
        painter.end()

    @property
    def fitting(self) -> list[PlacedSwatch]:
        """Swatches that fit into the legend, each with its left edge in pixels and its line number."""
        placed = self._placed_swatches()
        shown = [item for item in placed if item[2] < self._num_lines]
        while shown and len(shown) < len(placed) + self._num_more_owners:
            width = self.fontMetrics().horizontalAdvance(_more_text(len(placed) - len(shown) + self._num_more_owners))
            if self._next_x(shown) + width <= self.width() or self._next_x(shown) == 0:
                break
            shown.pop()
        return shown

    @property
    def more_label(self) -> str:
        num_hidden = len(self._placed_swatches()) - len(self.fitting) + self._num_more_owners
        return _more_text(num_hidden) if num_hidden else ""

    @property
    def _num_more_owners(self) -> int:
        return self._shown.num_more_owners if self._mode.has_request_colors else 0

    def _next_x(self, shown: list[PlacedSwatch]) -> int:
        if not shown:
            return self._swatches_left
        swatch, x, line = shown[-1]
        return x + self.swatch_width(swatch) + _BETWEEN if line == self._num_lines - 1 else 0

    def _update_num_lines(self) -> None:
        shown = self._shown
        kinds = tuple(kind for kind in MOVES if kind in (*shown.flashes, *shown.may_flash))
        last_line = max((line for *_, line in self._placed_swatches(replace(shown, flashes=kinds))), default=0)
        # requests come and go, so their legend keeps one line
        needs_one_line = (shown.is_plain and not kinds) or self._is_low or self._mode.has_request_colors
        num_lines = 1 if needs_one_line else min(last_line + 1, _MAX_LINES)
        if num_lines != self._num_lines:
            self._num_lines = num_lines
            self.updateGeometry()

    def _placed_swatches(self, shown: ShownItems | None = None) -> list[PlacedSwatch]:
        return list(self.lay_out_swatches(self._mode.legend(self.theme, shown or self._shown), self._swatches_left))

    @property
    def _swatches_left(self) -> int:
        scale = self._mode.scale(self._shown)
        return self.scale_width(scale) if scale is not None else 0

    def _draw_swatch(self, painter: QPainter, placed: PlacedSwatch) -> None:
        swatch, *_ = placed
        box = self.draw_swatch(painter, placed)
        if swatch.label == "shared":  # as in the cells, the mark identifies shared blocks without colour
            painter.fillRect(QRectF(box.right() - 5, box.top() + 2, 3, 3), self.theme.color("selection"))
        if swatch.is_pin:
            draw_corner(painter, self.theme, box.right() - 1, box.top() + 1, 0.6 * box.width())
        if swatch.flash is not None:
            self._draw_glyph(painter, box, swatch.flash)

    def _draw_glyph(self, painter: QPainter, box: QRectF, flash: FlashKind) -> None:
        mask = glyph(flash, 5)
        color = QColor(glyph_color(flash, self.theme))
        for y, x in zip(*(axis.tolist() for axis in mask.nonzero()), strict=True):
            painter.fillRect(QRectF(box.x() + 3 + x, box.y() + 3 + y, 1, 1), color)

    def _update_descriptions(self) -> None:
        swatches = self._mode.legend(self.theme, self._shown)
        labels = [f"flash: {s.label}" if s.flash is not None else s.label for s in swatches]
        if (scale := self._mode.scale(self._shown)) is not None:
            labels = [f"from {scale[1]} to {scale[2]}", *labels]
        self.setAccessibleName(f"Colours show {self._mode}: {', '.join(labels)}")
        owners_text = _OWNERS_LABEL if self._mode.has_request_colors else ""
        self.setToolTip(owners_text if self._shown.is_plain and not self.more_label else _tooltip(swatches))


def _more_text(num_hidden: int) -> str:
    return f"+{num_hidden} more"


def _tooltip(swatches: list[LegendSwatch]) -> str:
    colors = ", ".join(s.label for s in swatches if s.flash is None and not s.is_pin)
    owners = [_OWNERS_LABEL.capitalize() + "."] if any(s.label.startswith("#") for s in swatches) else []
    pins = ["Corner mark: pinned, protected from eviction."] if any(s.is_pin for s in swatches) else []
    flashes = [f"{s.label}: {FLASH_MEANINGS[s.flash]}" for s in swatches if s.flash is not None]
    flash_lines = ["A cell flashes when its block was", *flashes] if flashes else []
    return "\n".join([f"Colours: {colors}.", *owners, *pins, *flash_lines])
