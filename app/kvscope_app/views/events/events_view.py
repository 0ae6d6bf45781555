"""View of all events of the timeline, newest first, with search, cursor and export.

Owns the filter bar, and connects the rows with the session's cursor and selection.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Final

import numpy as np
from PySide6.QtCore import QItemSelectionModel, QMargins, QModelIndex, QObject, QSignalBlocker, QTimer
from PySide6.QtGui import QAction
from PySide6.QtWidgets import (
    QAbstractItemView,
    QLineEdit,
    QMenu,
    QStackedLayout,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from kvscope_app.session.event_log import LoggedEvent
from kvscope_app.session.session import Session
from kvscope_app.ui.file_dialogs import ask_save
from kvscope_app.ui.flow_layout import FlowLayout
from kvscope_app.ui.number_text import count, plural
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import empty_state, head_row, tool_button
from kvscope_app.ui.widgets import FittingLabel
from kvscope_app.views.base import View
from kvscope_app.views.events.event_entries import EventEntries
from kvscope_app.views.events.event_lines import EventExport
from kvscope_app.views.events.event_search import EventSearch, IntArray
from kvscope_app.views.events.event_table import EventTable
from kvscope_app.views.table import Index
from kvscope_app.views.time_navigator import TimeNavigator
from kvscope_app.views.visibility import is_on_screen
from kvscope_telemetry.messages.event_kinds import KIND_NAMES, kind_text
from kvscope_telemetry.summaries.event_index import EventIndex
from kvscope_telemetry.summaries.summary import TimedEvent

_FILES: Final = "Comma separated (*.csv);;Tab separated (*.tsv)"
EMPTY_TEXT: Final = "No events yet.\nAdmissions, preemptions, completions and refusals appear here, with their causes."


class EventsView(View):
    title: ClassVar[str] = "Events"
    object_name: ClassVar[str] = "events"
    refresh_hz: ClassVar[float] = 5.0

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self._navigator = TimeNavigator(session)
        self._search = EventSearch()
        self._shown_state: tuple[object, ...] = ()
        self.model = IndexModel(self)
        self.table = EventTable(self.model, "Events")
        self.table.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.text = QLineEdit()
        self.text.setPlaceholderText("Search, or #12 for a request")
        self.text.setAccessibleName("Find in events")
        self.text.setClearButtonEnabled(True)
        self.kinds = tool_button("All kinds ▾", "Kinds of events")
        self.kind_actions = self._make_kind_menu()
        self.preemptions = tool_button(
            "Preemptions",
            "Show only preemptions: which request, why, and how many tokens are recomputed",
            checkable=True,
        )
        self.only_selected = tool_button(
            "Selected request", "Only events of the selected request, or caused by it", checkable=True
        )
        self.only_in_range = tool_button(
            "In range", "Only events of the time to which the linked views are zoomed", checkable=True
        )
        self.export = tool_button("Export…", "Save the listed events to a file")
        self.count = FittingLabel()
        self._continue_timer = QTimer(self, singleShot=True, interval=0)
        self._continue_timer.timeout.connect(self.refresh)
        self._lay_out()
        self._connect()
        self.setFocusProxy(self.text)

    def refresh(self) -> None:
        self._navigator.select_pending()
        events = self.session.overview.events
        self._search.request = (self._navigator.selected or (-1, -1)) if self.only_selected.isChecked() else None
        self._search.span = self.session.timeline.shared_zoom.span if self.only_in_range.isChecked() else None
        filtered = (self._search.kinds, self._search.request, self._search.span, self.text.text())
        state = (id(events), events.num_forgotten, len(events), filtered)
        if state != self._shown_state:
            self._search_events(events, state)
        self._show_cursor()

    def _search_events(self, events: EventIndex, state: tuple[object, ...]) -> None:
        self._search.set_text(self.text.text())
        has_more = self._search.update(events)
        self._show_rows(has_more)
        self._shown_state = () if has_more else state
        if has_more:
            self._continue_timer.start()

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        self.model.theme = theme
        self.table.viewport().update()

    def export_to(self, path: str) -> EventExport:
        export = EventExport(path, self.model.shown_events(), self)
        export.done.connect(self.count.set_variants)
        return export

    def _show_rows(self, has_more: bool) -> None:
        bar, old_num_rows, top = self.table.verticalScrollBar(), self.model.rowCount(), self.table.rowAt(0)
        current = self.model.timed_at(self.table.currentIndex().row())
        self.model.show_serials(self.session.overview.events, self._search.serials)
        if top > 0 and self.model.rowCount() > old_num_rows > 0 and not has_more and bar.value() > 0:
            self.table.scroll_by(self.model.rowCount() - old_num_rows)
        if current is not None and not self.table.currentIndex().isValid():
            self._restore_selection(current)
        num_events = len(self.session.overview.events)
        num_rows = self.model.rowCount()
        text = plural(num_events, "event")
        if num_rows < num_events or has_more:
            text = f"{count(num_rows)} of {count(num_events)}"
        self.count.set_variants(text + (", searching…" if has_more else ""), text, count(num_rows))
        self._stack.setCurrentIndex(1 if num_events else 0)
        self.export.setEnabled(num_rows > 0)

    def _show_cursor(self) -> None:
        timeline = self.session.timeline
        at_ns = None if timeline.is_live else timeline.cursor_ns
        has_moved = at_ns is not None and at_ns != self.model.cursor_ns
        if at_ns != self.model.cursor_ns:
            self.model.cursor_ns = at_ns
            self.table.viewport().update()
        self.table.show_cursor(0 if at_ns is None else self.model.num_ahead(at_ns), has_moved=has_moved)

    def _restore_selection(self, timed: object) -> None:
        flags = QItemSelectionModel.SelectionFlag.ClearAndSelect | QItemSelectionModel.SelectionFlag.Rows
        for row in range(min(self.model.rowCount(), 500)):
            if self.model.timed_at(row) is timed:
                self.table.selectionModel().setCurrentIndex(self.model.index(row, 0), flags)
                return

    def _on_chosen(self, entry: LoggedEvent) -> None:
        rows = {index.row() for index in self.table.selectionModel().selectedIndexes()}
        if len(rows) <= 1:  # several rows are selected for copying
            self._navigator.show_event(TimedEvent(entry.time_ns, entry.epoch, entry.event))

    def _on_kinds(self) -> None:
        kinds = [kind for kind, action in self.kind_actions.items() if action.isChecked()]
        is_all = len(kinds) in (0, len(KIND_NAMES))
        self._search.set_kinds(None if is_all else kinds)
        kinds_text = ", ".join(map(kind_text, kinds)) if len(kinds) <= 2 else f"{len(kinds)} kinds"
        self.kinds.setText(f"{'All kinds' if is_all else kinds_text} ▾")
        with QSignalBlocker(self.preemptions):
            self.preemptions.setChecked(kinds == ["preempted"])
        self.refresh()

    def _on_preemptions(self, is_only: bool) -> None:
        for kind, action in self.kind_actions.items():
            with QSignalBlocker(action):
                action.setChecked(is_only and kind == "preempted")
        self._on_kinds()

    def _ask_file(self) -> None:
        ask_save(self, "Export events", Path("events.csv"), _FILES, self.export_to)

    def _make_kind_menu(self) -> dict[str, QAction]:
        menu = QMenu(self.kinds)
        actions = {kind: menu.addAction(kind_text(kind)) for kind in KIND_NAMES}
        for action in actions.values():
            action.setCheckable(True)
            action.toggled.connect(self._on_kinds)
        self.kinds.setMenu(menu)
        self.kinds.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
        return actions

    def _connect(self) -> None:
        self.table.entry_chosen.connect(self._on_chosen)
        self.text.textChanged.connect(self.refresh)
        self.only_selected.toggled.connect(self.refresh)
        self.only_in_range.toggled.connect(self.refresh)
        self.session.timeline.shared_zoom.changed.connect(self._on_overview_changed)
        self.preemptions.toggled.connect(self._on_preemptions)
        self.export.clicked.connect(self._ask_file)
        self.session.selection.changed.connect(self.refresh)
        self.session.overview_changed.connect(self._on_overview_changed)

    def _on_overview_changed(self) -> None:
        if is_on_screen(self):
            self.refresh()

    def _lay_out(self) -> None:
        widgets = (
            self.text,
            self.kinds,
            self.preemptions,
            self.only_selected,
            self.only_in_range,
            self.count,
            self.export,
        )
        bar = FlowLayout(*widgets, margins=QMargins(8, 6, 8, 4))
        body = QWidget()
        column = QVBoxLayout(body)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(head_row(bar))
        column.addWidget(self.table, 1)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(empty_state(EMPTY_TEXT))
        self._stack.addWidget(body)


class IndexModel(EventEntries):
    """Model of an overview's events, newest first. Stores only a serial per row.

    `wall_offset_ns` stays 0, because event times of an overview are ns since 1970.
    """

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(0, parent)
        self._events = EventIndex()
        self._serials: IntArray = np.empty(0, np.int64)

    def show_serials(self, events: EventIndex, serials: IntArray) -> None:
        """Show the events with these ascending serials.

        If the index only dropped its oldest events or got new ones, the other rows keep their selection.
        """
        still_indexed = self._serials[int(np.searchsorted(self._serials, events.num_forgotten)) :]
        if events is not self._events or not np.array_equal(serials[: still_indexed.size], still_indexed):
            self.beginResetModel()
            self._events, self._serials = events, serials
            self.endResetModel()
            return
        num_removed, num_added = self._serials.size - still_indexed.size, serials.size - still_indexed.size
        if num_removed:
            self.beginRemoveRows(QModelIndex(), still_indexed.size, self._serials.size - 1)
            self._serials = still_indexed
            self.endRemoveRows()
        if num_added:
            self.beginInsertRows(QModelIndex(), 0, num_added - 1)
            self._serials = serials
            self.endInsertRows()

    def timed_at(self, row: int) -> TimedEvent | None:
        """Return the event in `row`, or None if the index no longer contains it."""
        if not 0 <= row < self._serials.size:
            return None
        index = int(self._serials[-1 - row]) - self._events.num_forgotten
        return self._events[index] if 0 <= index < len(self._events) else None

    def entry_at(self, row: int) -> LoggedEvent | None:
        timed = self.timed_at(row)
        return None if timed is None else LoggedEvent(row + 1, timed.time_ns, timed.epoch, timed.event)

    def num_ahead(self, time_ns: int) -> int:
        """Return the number of rows, from the top, with events later than `time_ns`."""
        first = int(np.searchsorted(self._events.time_ns, time_ns, "right")) + self._events.num_forgotten
        return int(self._serials.size - np.searchsorted(self._serials, first))

    def shown_events(self) -> list[TimedEvent]:
        indices = self._serials - self._events.num_forgotten
        return [self._events[index] for index in indices[indices >= 0].tolist()]

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else int(self._serials.size)
