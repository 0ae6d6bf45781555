"""View of memory: how the device's bytes and the KV pool's blocks are used.

Shows a `MemoryAccount` and a `KVDetail`, which `memory_breakdown` computes.
"""

from __future__ import annotations

from typing import ClassVar, Final

from PySide6.QtCore import Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import (
    QBoxLayout,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QPushButton,
    QStackedLayout,
    QVBoxLayout,
    QWidget,
)
from shiboken6 import isValid

from kvscope_app.session.session import Session
from kvscope_app.session.shown_memory import shown_memory
from kvscope_app.ui.icons import pixmap
from kvscope_app.ui.number_text import UNKNOWN, num_bytes, percent, seconds, signed_bytes
from kvscope_app.ui.theme import Theme, mix
from kvscope_app.ui.widget_factories import empty_state, label, number_label, scroll_area, set_look
from kvscope_app.ui.widgets import ElidedLabel
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.chart.chart_stack import ChartedView
from kvscope_app.views.memory.detail_rows import counter_rows, detail_rows
from kvscope_app.views.memory.memory_breakdown import MemoryAccount, kv_detail, memory_account
from kvscope_app.views.memory.memory_part import MemoryPart
from kvscope_app.views.memory.over_time import MemoryOverTime
from kvscope_app.views.memory.segments.segments_sheet import SegmentsSheet, why_not
from kvscope_app.views.memory.stacked_bar import BarSegment, StackedBar, Swatch
from kvscope_app.views.memory.tier_table import TierTable
from kvscope_app.views.memory.tiers import tier_uses
from kvscope_app.views.memory.workspace import allocator_rows
from kvscope_telemetry.alarms.alarm_figures import forecast_at
from kvscope_telemetry.alarms.forecast import WINDOW_S
from kvscope_telemetry.source import Update

_WARN_BELOW_S: Final = 60.0
_FORECAST_TIP: Final = (
    f"Estimated from the last {WINDOW_S} seconds. Cached blocks count as free, because they are evicted on demand. "
    "When none is left, requests wait or are preempted"
)
EMPTY_TEXT = "Waiting for the engine's first report."
_WIDE_FROM = 680
"""Minimum width in pixels for showing the two tables side by side."""
_SEGMENTS_TIP = "A map of the segments and blocks of PyTorch's allocator, as reported now"
_SERIES_INDICES = {"weights": 6, "workspace": 7, "other": 4, "others": 3, "torch_cache": 5, "context": 2, "driver": 1}


class MemoryView(ChartedView):
    title: ClassVar[str] = "Memory"
    object_name: ClassVar[str] = "memory"
    refresh_hz: ClassVar[float] = 4.0
    follows_page_map: ClassVar[bool] = True

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self.heading = ElidedLabel()
        self.heading.setProperty("look", "heading")
        self.bar = StackedBar()
        self.bar.setAccessibleName("Device memory")
        self.forecast = ForecastLine(session)
        self.table = PartTable()
        self.details = DetailTable()
        self.tiers = TierTable()
        self.allocator_details = DetailTable()
        self._allocator_heading = label("Engine memory in detail", "heading")
        self.segments_button = QPushButton("PyTorch segments…")
        self.segments_button.clicked.connect(self.open_segments)
        self.segments_sheet: SegmentsSheet | None = None
        self.charts = MemoryOverTime(session)
        self._has_memory = False
        self._lay_out()
        session.timeline.updated.connect(self._on_update)

    def refresh(self) -> None:
        mirror, history, memory = self.session.mirror, self.session.history, shown_memory(self.session.timeline)
        if mirror.hello is None:
            return
        self._stack.setCurrentIndex(1)
        self._has_memory = memory is not None
        account = memory_account(mirror, memory, history.newest_sample, history.devices.newest)
        device = mirror.hello.device
        kind = {"cpu": "CPU memory", "cuda": "GPU memory", "unknown": "Device memory"}.get(device.kind, device.kind)
        self.heading.setText(f"{kind} · {device.name}" if device.name else kind)
        self.bar.show_segments(self._segments(account))
        self.forecast.refresh()
        self.table.show_account(account)
        self.tiers.show_uses(tier_uses(mirror), mirror.counters, mirror.capabilities)
        rows = detail_rows(kv_detail(mirror, memory))
        self.details.show_rows([*rows, *counter_rows(mirror.counters, mirror.capabilities)])
        self._show_allocator_details(allocator_rows(memory))
        self.charts.refresh()

    def _on_update(self, update: Update) -> None:
        """Show an engine's first memory breakdown even while paused, when views are not refreshed otherwise."""
        if update.memory is not None and not self._has_memory and self.session.timeline.is_paused:
            self.refresh()

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        self.bar.set_colors(theme.raised, theme.panel)
        self.forecast.apply_theme(theme)
        self.table.apply_theme(theme)
        self.tiers.apply_theme(theme)
        self.charts.apply_theme(theme)
        if self.segments_sheet is not None and isValid(self.segments_sheet):
            self.segments_sheet.apply_theme(theme)
        self.refresh()

    def draw_all(self) -> None:
        self.refresh()
        self.charts.refresh_all()

    def open_segments(self) -> None:
        self.segments_sheet = SegmentsSheet(self.window(), self.session, self.theme)
        self.segments_sheet.show()

    def _show_allocator_details(self, rows: list[tuple[str, str, str]]) -> None:
        self._allocator_heading.setVisible(bool(rows))
        self.allocator_details.show_rows(rows)
        reason = why_not(self.session)
        self.segments_button.setEnabled(not reason)
        self.segments_button.setToolTip(reason or _SEGMENTS_TIP)

    def _segments(self, account: MemoryAccount) -> list[BarSegment]:
        return [
            BarSegment(
                max(part.num_bytes or 0, 0) / account.whole_bytes, part_color(part, self.theme), _tip(account, part)
            )
            for part in account.parts
            if part.key != "free"
        ]

    def _lay_out(self) -> None:
        body = QWidget()
        column = QVBoxLayout(body)
        column.setContentsMargins(12, 10, 12, 12)
        column.setSpacing(8)
        column.addWidget(self.heading)
        column.addWidget(self.bar)
        column.addWidget(self.forecast)
        column.addLayout(self._tables())
        column.addWidget(self.charts)
        column.addStretch(1)
        scroll = scroll_area(body)
        self.charts.set_scroll_area(scroll)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(empty_state(EMPTY_TEXT))
        self._stack.addWidget(scroll)

    def _tables(self) -> QBoxLayout:
        pool = QWidget()
        pool_column = QVBoxLayout(pool)
        pool_column.setContentsMargins(0, 0, 0, 0)
        pool_column.setSpacing(6)
        pool_column.addWidget(label("KV pool in detail", "heading"))
        pool_column.addWidget(self.details)
        pool_column.addWidget(self.tiers)
        pool_column.addWidget(self._allocator_heading)
        pool_column.addWidget(self.allocator_details)
        pool_column.addWidget(self.segments_button, 0, Qt.AlignmentFlag.AlignLeft)
        self._tables_layout = QBoxLayout(QBoxLayout.Direction.TopToBottom)
        self._tables_layout.setSpacing(14)
        for table in (self.table, pool):
            self._tables_layout.addWidget(table, 1, Qt.AlignmentFlag.AlignTop)
        return self._tables_layout

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        is_wide = self.width() >= scaled(_WIDE_FROM)
        direction = QBoxLayout.Direction.LeftToRight if is_wide else QBoxLayout.Direction.TopToBottom
        self._tables_layout.setDirection(direction)
        self._tables_layout.setSpacing(48 if is_wide else 14)


class PartTable(QWidget):
    def __init__(self) -> None:
        super().__init__()
        self._grid = _grid(self)
        self.rows: dict[str, tuple[Swatch, QLabel, QLabel]] = {}
        self._parts: tuple[MemoryPart, ...] = ()
        self._theme: Theme | None = None

    def show_account(self, account: MemoryAccount) -> None:
        if [part.key for part in account.parts] != [part.key for part in self._parts]:
            self._clear()  # another engine, with more or fewer tiers
        self._parts = account.parts
        for part in account.parts:
            if part.key not in self.rows:
                self._add_row(part.key, part.label, part.meaning)
            _, size, share = self.rows[part.key]
            _show_value(size, signed_bytes(part.num_bytes))
            _show_value(share, percent(account.share(part)) if account.share(part) is not None else "")
        if "total" not in self.rows:
            self._add_row("total", "Whole device", "All device memory")
        _show_value(self.rows["total"][1], num_bytes(account.total_bytes))
        self._color_swatches()

    def _clear(self) -> None:
        self.rows.clear()
        while (item := self._grid.takeAt(0)) is not None:
            if (widget := item.widget()) is not None:
                widget.hide()
                widget.deleteLater()

    def value(self, key: str) -> str:
        return self.rows[key][1].text()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._color_swatches()

    def _color_swatches(self) -> None:
        if self._theme is not None:
            for part in self._parts:
                self.rows[part.key][0].set_color(part_color(part, self._theme))

    def _add_row(self, key: str, text: str, meaning: str) -> None:
        row = self._grid.rowCount()
        swatch, name, size, share = Swatch(), label(text, wraps=True), number_label(), number_label()
        share.setProperty("base_look", "muted")
        swatch.setVisible(key != "total")
        for column, widget in enumerate((swatch, name, size, share)):
            widget.setToolTip(meaning)
            alignment = Qt.AlignmentFlag.AlignVCenter
            self._grid.addWidget(widget, row, column, alignment if column < 2 else Qt.AlignmentFlag(0))
        self.rows[key] = (swatch, size, share)


class DetailTable(QWidget):
    def __init__(self) -> None:
        super().__init__()
        self._grid = _grid(self)
        self.rows: dict[str, tuple[QLabel, QLabel]] = {}

    def show_rows(self, rows: list[tuple[str, str, str]]) -> None:
        """Show rows of (name, value, explanation). A name that was shown before keeps its position."""
        names = {name for name, *_ in rows}
        for name, (text, value) in self.rows.items():
            text.setVisible(name in names)
            value.setVisible(name in names)
        for name, value_text, meaning in rows:
            if name not in self.rows:
                self._add_row(name, meaning)
            _show_value(self.rows[name][1], value_text)

    def value(self, name: str) -> str:
        return self.rows[name][1].text()

    def _add_row(self, name: str, meaning: str) -> None:
        row = self._grid.rowCount()
        text, value = label(name, wraps=True), number_label()
        text.setToolTip(meaning)
        value.setToolTip(meaning)
        self._grid.addWidget(text, row, 1)
        self._grid.addWidget(value, row, 2)
        self.rows[name] = text, value


def part_color(part: MemoryPart, theme: Theme) -> str:
    """Return the colour of a part: the page map's colour for KV blocks, otherwise one of the theme's series colours."""
    if part.color in _SERIES_INDICES:
        return theme.series[_SERIES_INDICES[part.color]]
    if part.color == "kv_free":  # part of the pool, so a shade of the colour of blocks in use
        return mix(theme.block_active, theme.base, 0.72)
    return theme.raised if part.color == "free" else str(getattr(theme, part.color))


def _tip(account: MemoryAccount, part: MemoryPart) -> str:
    share = account.share(part)
    return f"{part.label}: {signed_bytes(part.num_bytes)}" + (f", {percent(share)}" if share is not None else "")


def _grid(parent: QWidget) -> QGridLayout:
    grid = QGridLayout(parent)
    grid.setContentsMargins(0, 0, 0, 0)
    grid.setHorizontalSpacing(10)
    grid.setVerticalSpacing(5)
    grid.setColumnStretch(1, 1)
    return grid


def _show_value(value_label: QLabel, text: str) -> None:
    if value_label.text() != text:
        value_label.setText(text)
        set_look(value_label, "muted" if text == UNKNOWN else str(value_label.property("base_look") or ""))


class ForecastLine(QWidget):
    """Line with the time until free and cached blocks run out, at the session's cursor and the current rate.

    Hidden if they will not run out.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self.sign = label()
        self._text = ElidedLabel()
        self.setToolTip(_FORECAST_TIP)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(8)
        row.addWidget(self.sign)
        row.addWidget(self._text, 1)
        self.hide()

    @property
    def text(self) -> str:
        return "" if self.isHidden() else self._text.text()

    def refresh(self) -> None:
        left_s = forecast_at(self._session.overview, self._session.timeline.cursor_ns)
        self.setVisible(left_s is not None)
        if left_s is not None:
            time_text = f"{left_s:.0f} s" if left_s < 60 else seconds(left_s)
            self._text.setText(f"{self._available_blocks_text()} run out in {time_text} at this rate")
            self.sign.setVisible(left_s < _WARN_BELOW_S)

    def _available_blocks_text(self) -> str:
        overview, index = self._session.overview, self._session.overview.index_at(self._session.timeline.cursor_ns)
        available = [state for state in ("free", "cached") if overview.column(f"{state}_blocks")[index] > 0]
        return f"{' and '.join(available)} blocks".strip().capitalize()

    def apply_theme(self, theme: Theme) -> None:
        self.sign.setPixmap(pixmap("warning", theme.warn, scaled(16)))
