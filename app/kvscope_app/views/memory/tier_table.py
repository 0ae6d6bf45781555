"""Table of the lower tiers in the memory view: for each, a bar and the bytes that are swapped out, cached and free."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QGridLayout, QVBoxLayout, QWidget

from kvscope_app.ui.number_text import count, num_bytes, percent, plural
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.widget_factories import label, number_label
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.memory.stacked_bar import BarSegment, StackedBar, Swatch
from kvscope_app.views.memory.tiers import TierOccupancy, moved_text
from kvscope_app.views.page_map.color_modes import lower_cached
from kvscope_app.views.tier_style import tier_color
from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.messages.capabilities import OWN_ENGINE, Capabilities
from kvscope_telemetry.messages.telemetry import Counters

_KINDS: Final = ("swapped", "cached", "free")
_LABELS: Final = {"swapped": "Swapped out", "cached": "Cached", "free": "Free"}
_MEANINGS: Final = {
    "swapped": "Blocks of preempted requests, kept instead of recomputed",
    "cached": "Prefixes moved down from the tier above; loaded on a hit, evicted when space is needed",
    "free": "Empty blocks",
}
_BAR_HEIGHT: Final = 14


class TierTable(QWidget):
    def __init__(self) -> None:
        super().__init__()
        self._theme: Theme = DARK
        self.parts: dict[Tier, _TierPart] = {}
        self._uses: tuple[TierOccupancy, ...] = ()
        self._moved_label = label(look="muted", wraps=True)
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 6, 0, 0)
        self._column.setSpacing(8)
        self._column.addWidget(label("Lower tiers", "heading"))
        self._column.addWidget(self._moved_label)
        self.setVisible(False)

    def show_uses(
        self, uses: tuple[TierOccupancy, ...], counters: Counters, capabilities: Capabilities = OWN_ENGINE
    ) -> None:
        self._uses = uses
        self.setVisible(bool(uses))
        for use in uses:
            if use.tier not in self.parts:
                self.parts[use.tier] = _TierPart(use.title)
                self._column.insertWidget(self._column.count() - 1, self.parts[use.tier])
            self.parts[use.tier].show_use(use, self._theme)
        for tier, part in self.parts.items():
            part.setVisible(any(use.tier is tier for use in uses))
        self._moved_label.setText(moved_text(counters, capabilities))

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        for use in self._uses:
            self.parts[use.tier].show_use(use, theme)

    def value(self, tier: Tier, kind: str) -> str:
        return self.parts[tier].values[kind].text()

    @property
    def moved(self) -> str:
        return self._moved_label.text()


class _TierPart(QWidget):
    def __init__(self, title: str) -> None:
        super().__init__()
        self._swatches = {kind: Swatch() for kind in _KINDS}
        self.values = {kind: number_label() for kind in _KINDS}
        self._counts = {kind: number_label() for kind in _KINDS}
        self._total = number_label()
        self.bar = StackedBar()
        self.bar.setAccessibleName(title)
        self.bar.setFixedHeight(scaled(_BAR_HEIGHT))
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(10)
        self._grid.setVerticalSpacing(5)
        self._grid.setColumnStretch(1, 1)
        self._grid.addWidget(label(title, wraps=True), 0, 0, 1, 2)
        self._grid.addWidget(self._total, 0, 2, 1, 2)
        self._grid.addWidget(self.bar, 1, 0, 1, 4)
        for row, kind in enumerate(_KINDS, start=2):
            self._add_row(row, kind)

    def show_use(self, use: TierOccupancy, theme: Theme) -> None:
        color = tier_color(use.tier, theme)
        colors = {"swapped": color, "cached": lower_cached(color, theme), "free": theme.block_free}
        counts = {"swapped": use.swapped, "cached": use.cached, "free": use.free}
        self._total.setText(f"{num_bytes(use.num_bytes(use.size))}, {plural(use.size, 'place')}")
        for kind in _KINDS:
            self._swatches[kind].set_color(colors[kind])
            self.values[kind].setText(num_bytes(use.num_bytes(counts[kind])))
            self._counts[kind].setText(count(counts[kind]))
        self.bar.set_colors(theme.raised, theme.panel)
        self.bar.show_segments([_segment(kind, counts[kind], use, colors[kind]) for kind in ("swapped", "cached")])

    def _add_row(self, row: int, kind: str) -> None:
        cells = (self._swatches[kind], label(_LABELS[kind], wraps=True), self.values[kind], self._counts[kind])
        for column, widget in enumerate(cells):
            widget.setToolTip(_MEANINGS[kind])
            alignment = Qt.AlignmentFlag.AlignVCenter if column < 2 else Qt.AlignmentFlag(0)
            self._grid.addWidget(widget, row, column, alignment)


def _segment(kind: str, num_blocks: int, use: TierOccupancy, color: str) -> BarSegment:
    share = num_blocks / max(1, use.size)
    return BarSegment(share, color, f"{_LABELS[kind]}: {plural(num_blocks, 'block')}, {percent(share)}")
