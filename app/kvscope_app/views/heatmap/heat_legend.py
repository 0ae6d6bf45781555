"""Legend of the heatmap's colours, with the same labels as the page map's legend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from PySide6.QtCore import QPointF
from PySide6.QtGui import QPainter, QPaintEvent, QPen, QResizeEvent
from PySide6.QtWidgets import QWidget

from kvscope_app.ui.theme import Theme
from kvscope_app.views.block_locations import tier_title
from kvscope_app.views.heatmap.cell_keys import HeatMode, unreferenced_color
from kvscope_app.views.page_map.color_modes import FILL_SCALE, STATE
from kvscope_app.views.page_map.legend_items import LegendSwatch, ShownItems
from kvscope_app.views.page_map.swatch_legend import PlacedSwatch, SwatchLegend
from kvscope_app.views.tier_style import distinct_tier_colors
from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.messages.telemetry import DeviceInfo

_SPACING: Final = 14
_SCALE_WIDTH: Final = 90
_NOT_DRAWN: Final = ("held, empty slots", "no memory behind it")
"""Labels of the page map's legend for states that overview bins do not distinguish."""
GAP_LABEL: Final = "not recorded"
_OWNERS_LABEL: Final = "one colour per request"


def heat_swatches(mode: HeatMode, theme: Theme, shown: ShownItems, device: DeviceInfo) -> list[LegendSwatch]:
    if mode is HeatMode.STATE:
        return [swatch for swatch in STATE.legend(theme, shown) if swatch.label not in _NOT_DRAWN]
    free = LegendSwatch(theme.block_free, "free")
    if mode is HeatMode.USED:
        return [free]
    if mode is HeatMode.OWNER:
        return [LegendSwatch(unreferenced_color(theme), "cached, not held"), free]
    colors = distinct_tier_colors(theme)
    tiers = [(tier, colors[tier]) for tier in colors if tier is Tier.HBM or tier in shown.tiers]
    return [*(LegendSwatch(color, tier_title(tier, device)) for tier, color in tiers), free]


class HeatLegend(SwatchLegend):
    """Legend with one line, or two if the view is high enough. The tooltip has all labels."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent, between=_SPACING, scale_width=_SCALE_WIDTH)
        self._mode = HeatMode.STATE
        self._swatches: list[LegendSwatch] = []
        self._has_gaps, self._is_low = False, False
        self.shows_stops = False

    def show_mode(
        self, mode: HeatMode, theme: Theme, shown: ShownItems, device: DeviceInfo, *, gaps: bool, stops: bool = False
    ) -> None:
        """Show the colours of `mode`.

        Args:
            mode: Quantity that the colours show.
            theme: Theme of the colours.
            shown: Tiers and states that occur.
            device: Device whose memory the pool is in, which names its tier.
            gaps: Whether there are seconds without data.
            stops: Whether the engine was ever paused or suspended.
        """
        self._mode, self.theme, self._has_gaps, self.shows_stops = mode, theme, gaps, stops
        self._swatches = heat_swatches(mode, theme, shown, device)
        if gaps:
            self._swatches.append(LegendSwatch(theme.base, GAP_LABEL))
        if stops:
            self._swatches.append(LegendSwatch(theme.warn, "engine paused or suspended (bar above)"))
        self.setToolTip(self._description())
        self.setAccessibleName(f"Colours show {mode}. {self._description()}")
        self.updateGeometry()
        self.update()

    def set_low(self, is_low: bool) -> None:
        """Limit the legend to one line, or allow two again."""
        if is_low != self._is_low:
            self._is_low = is_low
            self.updateGeometry()

    @property
    def num_lines(self) -> int:
        return 1 if self._is_low else min(max((line for *_, line in self._placed_swatches()), default=0) + 1, 2)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.updateGeometry()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if self._mode is HeatMode.USED:
            self.draw_scale(painter, FILL_SCALE)
        if self._mode is HeatMode.OWNER:
            self.draw_owners(painter, 0, _OWNERS_LABEL)
        for placed in self._placed_swatches():
            if placed[2] < self.num_lines:
                self._draw_swatch(painter, placed)
        painter.end()

    def _placed_swatches(self) -> Iterator[PlacedSwatch]:
        return self.lay_out_swatches(self._swatches, self._swatches_left)

    @property
    def _swatches_left(self) -> int:
        if self._mode is HeatMode.USED:
            return self.scale_width(FILL_SCALE)
        return self.owners_width(_OWNERS_LABEL) if self._mode is HeatMode.OWNER else 0

    def _description(self) -> str:
        texts = [swatch.label for swatch in self._swatches]
        if self._mode is HeatMode.USED:
            texts.insert(0, "blocks in use, from full to empty slots")
        if self._mode is HeatMode.OWNER:
            texts.insert(0, f"{_OWNERS_LABEL} (the newest of several per row)")
        note = "" if self._mode in (HeatMode.USED, HeatMode.OWNER) else " Fainter rows have fewer blocks."
        return f"Colours: {', '.join(texts)}.{note}"

    def _draw_swatch(self, painter: QPainter, placed: PlacedSwatch) -> None:
        swatch, *_ = placed
        box = self.draw_swatch(painter, placed)
        if swatch.label == GAP_LABEL:
            painter.setPen(QPen(self.theme.color("muted"), 1))
            for left, right in ((2, 6), (5, 9)):
                painter.drawLine(box.topLeft() + QPointF(left, 9), box.topLeft() + QPointF(right, 2))
