"""View of fragmentation: heatmap of addresses over time, lengths of free runs, internal and external fragmentation.

Owns the colour mode, and decides which parts are shown in the available space. All data is from the session's overview.
"""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
from PySide6.QtCore import QSize
from PySide6.QtGui import QResizeEvent, QShowEvent
from PySide6.QtWidgets import QBoxLayout, QHBoxLayout, QLayout, QStackedLayout, QVBoxLayout, QWidget

from kvscope_app.session.overview_window import first_relevant_ns
from kvscope_app.session.session import Session
from kvscope_app.session.time_span import TimeSpan
from kvscope_app.ui.number_text import count, percent, plural
from kvscope_app.ui.theme import Theme, mix
from kvscope_app.ui.widget_factories import empty_state, tool_button
from kvscope_app.ui.widgets import ElidedLabel, SegmentedControl
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.base import View
from kvscope_app.views.block_locations import tier_title
from kvscope_app.views.capability_messages import why_no_addresses
from kvscope_app.views.heatmap.address_rows import num_cells
from kvscope_app.views.heatmap.cell_keys import HeatMode, key_pixels
from kvscope_app.views.heatmap.cell_text import cell_text, runs_text
from kvscope_app.views.heatmap.curve_strips import CurveStrip, Ruler
from kvscope_app.views.heatmap.heat_canvas import Cell, HeatCanvas, RowLabel
from kvscope_app.views.heatmap.heat_legend import HeatLegend
from kvscope_app.views.heatmap.key_store import KeyStore
from kvscope_app.views.heatmap.measures import MAX_LEVEL, NO_RUNS, num_sizes, run_keys
from kvscope_app.views.heatmap.pools import PoolRegistry
from kvscope_app.views.heatmap.time_area import TimeArea, gutter
from kvscope_app.views.heatmap.time_frame import TimeFrame, TimeFrameMode
from kvscope_app.views.page_map.drawing.pixel_tables import Pixels, pixel
from kvscope_app.views.page_map.legend_items import shown_in
from kvscope_app.views.range_link import RangeLink
from kvscope_app.views.visibility import is_on_screen
from kvscope_telemetry.messages.telemetry import DeviceInfo, Hello
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.pool_use import pool_use
from kvscope_telemetry.summaries.address_bins import free_run_lengths
from kvscope_telemetry.summaries.run_figures import fragmentation_of, waste_of
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

EMPTY_TEXT: Final = (
    "No history yet.\nOne second after an engine starts to report, this shows what each address held over time."
)
MODES: Final = tuple(HeatMode)
_TIPS: Final = (
    "State of the blocks at each address: active, shared, cached or free",
    "Filled slots of the blocks in use",
    "Owner request (the newest of several)",
    "Tier that holds them",
)
_MAP_HEIGHT: Final = 92
_RUNS_HEIGHT: Final = 78
_OTHERS_HEIGHT: Final = 92
"""Height in pixels of the row of buttons, the ruler and the legend together, which are always visible."""
_MARGIN: Final = 8
_WIDE_FROM: Final = 760
"""Minimum width in pixels at which the text is next to the buttons instead of below them."""
_LOW_BELOW: Final = 420
"""Height in pixels below which the legend has one line."""
_MIN_SIZE: Final = QSize(300, 168)


class HeatmapView(View):
    title: ClassVar[str] = "Fragmentation"
    object_name: ClassVar[str] = "heatmap"
    refresh_hz: ClassVar[float] = 4.0

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self.mode = HeatMode.STATE
        self.frame = TimeFrame(self)
        self.link = RangeLink(session.timeline.shared_zoom, self, self.frame.show_only, self.frame.end_zoom)
        self.pools = PoolRegistry()
        self._stores: tuple[KeyStore, KeyStore] | None = None
        self._num_addresses = 0
        self._hover_ns: int | None = None
        self._make_parts()
        self._lay_out()
        self._connect()

    def set_mode(self, mode: HeatMode) -> None:
        self.mode = mode
        self._modes.set_current(MODES.index(mode))
        self._stores = None
        self._update_colors()
        self.refresh()

    def refresh(self) -> None:
        overview = self.session.overview
        reason = why_no_addresses(self.session.mirror.capabilities)
        self._modes.setEnabled(not reason)
        if reason:
            self.no_addresses_label.setText(f"{reason}.")
            self.stack.setCurrentIndex(2)
            return
        self.stack.setCurrentIndex(1 if len(overview) else 0)
        if not len(overview):
            return
        self._record_pool(overview)
        self._set_width()
        self._show_stores(overview)
        begin_ns, end_ns = int(overview.time_ns[0]), int(overview.time_ns[-1]) + SECOND_NS
        timeline = self.session.timeline
        self.frame.set_range(begin_ns if timeline.is_file else first_relevant_ns(overview, begin_ns, end_ns), end_ns)
        self.link.start()
        self.strips.show_overview(overview)
        self.strips.show_current(self.session.mirror)
        for part in self._parts:
            part.show_cursor(timeline.cursor_ns)
            part.show_stops(overview.stops)
        if self.legend.shows_stops != (len(overview.stops) > 0):
            self._show_legend()
        self._show_cell(self.map.cell if self.map.hasFocus() else None)

    def show_range(self, begin_ns: int, end_ns: int) -> None:
        self.frame.show_only(TimeSpan(begin_ns, end_ns))

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        for part in self._parts:
            part.apply_theme(theme)
        self.link.apply_theme(theme)
        self._update_colors()

    def minimumSizeHint(self) -> QSize:
        """Return a fixed size, because parts that do not fit are hidden instead of enlarging the dock."""
        return _MIN_SIZE

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._show_parts_that_fit()
        self._set_width()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._set_width()
        self.refresh()

    # Data

    def _record_pool(self, overview: SessionOverview) -> None:
        mirror = self.session.mirror
        if mirror.hello is not None and self.pools.record(mirror.hello.epoch, mirror.hello.cache):
            self._stores = None
        num_addresses = int(overview.column("num_rows").max())
        if num_addresses != self._num_addresses:
            self._num_addresses, self._stores = num_addresses, None

    def _show_stores(self, overview: SessionOverview) -> None:
        if self._stores is None:
            self._stores = self._new_stores()
            self._show_legend()
        cells, runs = self._stores
        cells_from, runs_from = cells.update(overview), runs.update(overview)
        self.map.show_store(cells, address_labels(self._num_addresses, self.session.mirror.hello), cells_from)
        self.runs.show_store(runs, run_labels(runs.num_cells), runs_from)

    def _new_stores(self) -> tuple[KeyStore, KeyStore]:
        mode, pools, num_addresses = self.mode, self.pools, self._num_addresses
        cells = KeyStore(lambda overview, at: pools.keys(mode, overview, at, num_addresses), num_cells(num_addresses))
        sizes = num_sizes(num_addresses)
        return cells, KeyStore(lambda overview, at: run_keys(overview, at, sizes), sizes)

    # Appearance

    def _update_colors(self) -> None:
        self.map.set_colors(key_pixels(self.mode, self.theme), self.theme)
        self.runs.set_colors(run_colors(self.theme), self.theme)
        self._show_legend()

    def _show_legend(self) -> None:
        mirror = self.session.mirror
        device = DeviceInfo(kind="cpu", name="") if mirror.hello is None else mirror.hello.device
        overview = self.session.overview
        gaps, stops = bool(np.any(np.diff(overview.time_ns) > SECOND_NS)), len(overview.stops) > 0
        self.legend.show_mode(self.mode, self.theme, shown_in(mirror, ()), device, gaps=gaps, stops=stops)

    def _show_frame(self) -> None:
        self.fit_button.setChecked(self.frame.mode is TimeFrameMode.FIT)
        self.follow_button.setChecked(self.frame.mode is TimeFrameMode.FOLLOW)

    def _set_width(self) -> None:
        width = round((self.map.width() - gutter()) * self.devicePixelRatioF())
        if self.map.isVisible():
            self.frame.set_width(width)

    def _show_parts_that_fit(self) -> None:
        is_wide = self.width() >= scaled(_WIDE_FROM)
        self._top_row.setDirection(QBoxLayout.Direction.LeftToRight if is_wide else QBoxLayout.Direction.TopToBottom)
        self.legend.set_low(self.height() < scaled(_LOW_BELOW))
        buttons_height = 0 if is_wide else self.fit_button.sizeHint().height()
        available = self.height() - scaled(_MAP_HEIGHT + _OTHERS_HEIGHT) - buttons_height
        for part in self._by_priority:
            available -= part.sizeHint().height() + 2
            part.setVisible(available >= 0)
        self._runs_title.setVisible(not self.runs.isHidden())

    # User input

    def _show_hover(self, cell: Cell | None) -> None:
        self._hover_ns = None if cell is None else cell.time_ns
        for part in self._parts:
            part.show_hover(self._hover_ns)

    def _on_part_pointed(self, part: TimeArea, at: object) -> None:
        self._show_hover(None if at is None else Cell(part.time_at(at.x()), 0))  # type: ignore[attr-defined]

    def _show_cell(self, cell: Cell | None) -> None:
        if cell is None or self._stores is None:
            if self._hover_ns is None:
                self.caption.setText("")
            return
        cells = self._stores[0].num_cells
        address = cell.row * self._num_addresses // max(cells, 1)
        self._show_caption(cell_text(self.session.overview, self.pools, cell.time_ns, address), self.map)

    def _show_run(self, cell: Cell | None) -> None:
        if cell is None or self._stores is None:
            return
        exponent = self._stores[1].num_cells - 1 - cell.row
        self._show_caption(runs_text(self.session.overview, cell.time_ns, exponent), self.runs)

    def _show_caption(self, text: str, canvas: HeatCanvas) -> None:
        self.caption.setText(text)
        self.caption.setToolTip(text)
        if canvas.hasFocus():
            canvas.announce(text)

    def _go_to(self, time_ns: int) -> None:
        """Go to the end of the second that contains `time_ns`, because the heatmap shows the state at that time."""
        self.session.timeline.go_to((time_ns // SECOND_NS + 1) * SECOND_NS - 1)
        self.refresh()

    def _on_overview(self) -> None:
        if is_on_screen(self):
            self.refresh()

    # Construction

    def _make_parts(self) -> None:
        frame = self.frame
        self.map = HeatCanvas(frame, "Fragmentation: addresses over time", height=_MAP_HEIGHT, grows=True)
        self.runs = HeatCanvas(frame, "Lengths of free runs over time", height=_RUNS_HEIGHT, grows=False)
        self.strips = LossStrips(frame)
        self._ruler = Ruler(frame)
        strips = self.strips
        self._by_priority = (strips.external, strips.internal, self.runs, strips.longest, strips.number)
        self._parts: tuple[TimeArea, ...] = (self.map, self.runs, *strips.all, self._ruler)
        self.caption, self.legend = ElidedLabel(), HeatLegend()
        self._runs_title = ElidedLabel("Free-run lengths (blocks); fainter = fewer")
        self._modes = SegmentedControl([mode.capitalize() for mode in MODES], "Colour by", is_collapsible=True)
        self.fit_button = tool_button(
            "Fit", "Show the whole timeline (F, or double-click)", checkable=True, checked=True
        )
        self.follow_button = tool_button("Follow", "Keep the latest data at the right edge", checkable=True)

    def _lay_out(self) -> None:
        self._top_row = QHBoxLayout()
        self._top_row.setSpacing(6)
        for index, tip in enumerate(_TIPS):
            self._modes.set_tip(index, tip)
        line = QHBoxLayout()
        line.addWidget(self.caption, 1)
        line.addWidget(self.fit_button)
        line.addWidget(self.follow_button)
        line.addWidget(self.link.button)
        self._top_row.addWidget(self._modes)
        self._top_row.addLayout(line, 1)
        for text_label in (self.caption, self._runs_title):
            text_label.setProperty("look", "muted")
        parts = QWidget()
        column = QVBoxLayout(parts)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(2)
        strips = self.strips
        over_map: tuple[QWidget, ...] = (strips.external, strips.internal)
        under_map: tuple[QWidget, ...] = (self._ruler, self._runs_title, self.runs, strips.longest, strips.number)
        for widget in (*over_map, self.map, *under_map, self.legend):
            column.addWidget(widget, 1 if widget is self.map else 0)
        pages = QWidget()
        self.stack = QStackedLayout(pages)
        self.stack.addWidget(empty_state(EMPTY_TEXT))
        self.stack.addWidget(parts)
        self.no_addresses_label = empty_state("")
        self.stack.addWidget(self.no_addresses_label)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(_MARGIN, 6, _MARGIN, 6)
        layout.setSizeConstraint(QLayout.SizeConstraint.SetNoConstraint)
        layout.setSpacing(4)
        layout.addLayout(self._top_row)
        layout.addWidget(pages, 1)
        self.setFocusProxy(self.map)

    def _connect(self) -> None:
        self._modes.chosen.connect(lambda index: self.set_mode(MODES[index]))
        self.fit_button.clicked.connect(self.frame.fit)
        self.fit_button.clicked.connect(self._show_frame)
        self.follow_button.clicked.connect(self.frame.set_following)
        self.frame.changed.connect(self._show_frame)
        self.frame.span_chosen.connect(self.link.choose)
        for part in self._parts:
            part.chosen.connect(self._go_to)
        for strip in (*self.strips.all, self._ruler):
            strip.pointed.connect(lambda at, strip=strip: self._on_part_pointed(strip, at))
        for canvas, show in ((self.map, self._show_cell), (self.runs, self._show_run)):
            canvas.cell_pointed.connect(self._show_hover)
            canvas.cell_pointed.connect(show)
        self.session.overview_changed.connect(self._on_overview)


def run_colors(theme: Theme) -> Pixels:
    """Return the pixel of each key of the picture of free runs, shape (256,). More runs have a stronger colour."""
    colors = [theme.base] * 256
    for level in range(1, MAX_LEVEL + 1):
        share = 0.4 + 0.6 * (level - 1) / (MAX_LEVEL - 1)
        colors[NO_RUNS + level] = mix(theme.base, theme.text, share)
    return np.array([pixel(color) for color in colors], np.uint32)


class LossStrips:
    """Four curves around the heatmap: external and internal fragmentation, longest free run, and number of free runs.

    Supplies the curves with data. All curves use `frame` as their time axis; the view lays them out.
    """

    def __init__(self, frame: TimeFrame) -> None:
        self.external = _share_strip(
            frame, "External fragmentation", "Share of free blocks outside the longest free run", 1
        )
        self.longest = CurveStrip(
            frame,
            "Longest free run",
            "Consecutive free blocks",
            0,
            lambda v: plural(round(v), "block"),
            count,
        )
        self.number = CurveStrip(frame, "Free runs", "Number of runs of free blocks", 2, count, count)
        self.internal = _share_strip(frame, "Internal fragmentation", "Wasted share of the slots that requests hold", 3)
        self.all = (self.external, self.longest, self.number, self.internal)
        self._shown_version: tuple[SessionOverview, int] | None = None

    def show_overview(self, overview: SessionOverview) -> None:
        version = (overview, overview.version)
        if version == self._shown_version:
            return
        self._shown_version = version
        self.external.show_values(overview.time_ns, fragmentation_of(overview))
        self.longest.show_values(overview.time_ns, overview.column("longest_free_run"))
        self.number.show_values(overview.time_ns, overview.column("num_free_runs"))
        self.internal.show_values(overview.time_ns, waste_of(overview))

    def show_current(self, mirror: Mirror) -> None:
        """Show the values at the cursor. `mirror` has the state at the cursor's time."""
        use, has_slots = pool_use(mirror), mirror.capabilities.filled
        runs = free_run_lengths(mirror.ledger.state[: mirror.num_blocks])
        waste, external = use.internal_fragmentation, use.external_fragmentation
        self.external.show_current(np.nan if external is None else external)
        self.longest.show_current(float(runs.max(initial=0)))
        self.number.show_current(float(runs.size))
        self.internal.show_current(np.nan if waste is None or not has_slots else waste)


def _share_strip(frame: TimeFrame, title: str, tip: str, series: int) -> CurveStrip:
    return CurveStrip(frame, title, tip, series, percent, lambda share: percent(share, 0), top=1.0)


# Labels next to the heatmap's rows: addresses or lengths of free runs. These functions do not depend on Qt.
def address_labels(num_addresses: int, hello: Hello | None) -> list[RowLabel]:
    """Return a label for the first row of each tier or, with a single tier, for its first and last address."""
    cells = num_cells(num_addresses)
    if hello is None or hello.cache.num_rows != num_addresses:
        return [RowLabel(0, "0"), RowLabel(cells, count(num_addresses - 1))]
    tiers, labels = hello.cache.rows_by_tier.present, []
    for tier, rows in tiers.items():
        name = tier_title(tier, hello.device) if len(tiers) > 1 else "0"
        labels.append(RowLabel(rows.start * cells / num_addresses, name, line=rows.start > 0))
    return [*labels, RowLabel(cells, count(num_addresses - 1))] if len(tiers) == 1 else labels


def run_labels(num_sizes: int) -> list[RowLabel]:
    """Return a label with the minimum run length for each size class, longest runs first."""
    top = num_sizes - 1
    return [RowLabel(top - power, f"{count(1 << power)}" + ("+" if power else "")) for power in range(top, -1, -1)]
