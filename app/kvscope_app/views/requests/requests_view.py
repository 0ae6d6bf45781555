"""View of the requests: a table of all requests of the session, and the details of the selected one.

Owns the filter, and synchronizes the selection between table and session. Latencies in the table cover a request's
whole life; its state is shown for the time of the cursor.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
from PySide6.QtCore import QEvent, QItemSelection, QItemSelectionModel, QMargins, QSettings, Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import (
    QComboBox,
    QHBoxLayout,
    QLineEdit,
    QSizePolicy,
    QSplitter,
    QStackedLayout,
    QVBoxLayout,
    QWidget,
)

from kvscope_app.session.session import Session
from kvscope_app.setting_names import REQUEST_GOALS
from kvscope_app.ui.clock_text import clock_text
from kvscope_app.ui.confirmation import confirm
from kvscope_app.ui.flow_layout import FlowLayout
from kvscope_app.ui.number_text import count, plural
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import empty_state, head_row
from kvscope_app.ui.widgets import ElidedLabel
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.base import View
from kvscope_app.views.requests.numbers import RequestNumbers
from kvscope_app.views.requests.request_detail import RequestDetail
from kvscope_app.views.requests.request_model import RequestModel
from kvscope_app.views.requests.request_rows import FILTER_TIPS, Filter, at_moment
from kvscope_app.views.requests.requests_table import MOMENTS, RequestTable
from kvscope_app.views.requests.waiting_text import queue_text, why_waits
from kvscope_app.views.visibility import is_on_screen
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.commands import Abort
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.slo import GOAL_NAMES, GoalResults, goals_text, read_goals

_MIN_WIDTH_SIDE_BY_SIDE = 900
_LOW_HEIGHT = 400
_MIN_ROWS = 5
EMPTY_TEXT = "No requests yet.\nSend a prompt from the console, or start the load."
_GOALS_TIP = "\n".join(f"{name}: {meaning}" for name, meaning in GOAL_NAMES.items())
EMPTY_RECORDING = "This recording contains no requests."
_READING_REFRESH_S = 1.0
"""Seconds between updates of the table while a recording is read, because sorting and painting slow down the reading.
"""
_MAX_REASONS = 5_000
"""Maximum number of cached delay reasons. Computing one takes about a millisecond with 100,000 requests."""


class RequestsView(View):
    title: ClassVar[str] = "Requests"
    object_name: ClassVar[str] = "requests"
    refresh_hz: ClassVar[float] = 5.0
    _is_built = False

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self.model = RequestModel(self)
        self.model.waiting_reason_of = self._waiting_reason
        self.model.reason = self._delay_reason
        self._reasons: dict[int, tuple[str, int]] = {}
        """Reason for the delay and the event log version it was computed from, by request key. Version -1 means that
        the reason is final.
        """
        self.table = RequestTable(self.model)
        self.detail = RequestDetail(session)
        self.detail.missed_goals_of = self.model.missed_goals
        self.detail.delays_of = self._delays_of_number
        self.detail.delay_of = self._delay_of_number
        self.numbers = RequestNumbers()
        """Page shown instead of table and details for an engine that does not report single requests."""
        self.filter = QComboBox()
        self.filter.addItems([choice.value for choice in Filter])
        for index, choice in enumerate(Filter):
            self.filter.setItemData(index, FILTER_TIPS[choice], Qt.ItemDataRole.ToolTipRole)
        self.filter.setAccessibleName("Requests shown")
        self.goals = QLineEdit()
        self.goals.setPlaceholderText("Goals in ms, as ttft:200 tpot:50")
        self.goals.setAccessibleName("Goals in milliseconds")
        self.goals.setToolTip(_GOALS_TIP)
        self.goals.hide()
        self._goals_error = ""
        self.search = QLineEdit()
        self.search.setPlaceholderText("Find by id, number, adapter or client")
        self.search.setClearButtonEnabled(True)
        self.search.setAccessibleName("Find requests")
        self.search.setToolTip(
            "Part of a request's id or adapter name, a request number, or a client, such as client 3"
        )
        self.count = ElidedLabel()
        self.count.setProperty("look", "muted")
        self.count.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)
        self.note = ElidedLabel()
        self.note.setProperty("look", "muted")
        self.note.hide()
        self._is_reordering = False
        self._is_split_by_user = False
        self._is_detail_wanted = False
        self._shown_mirror: Mirror | None = None
        self._shown_state: tuple[object, ...] = ()
        self._refreshed_s = 0.0
        self._pending_selection: tuple[int, int] | None = None
        """(epoch, number) of a request to select when that engine run is shown; None if there is none."""
        self._lay_out()
        self._connect()
        self._is_built = True

    def refresh(self) -> None:
        history, mirror, requests = self.session.history, self.session.mirror, self.session.requests
        state = (
            requests.log.version,
            requests.share,
            mirror.epoch,
            mirror.seq,
            mirror.figures,
            mirror.requests.layout,
            history.events.last_serial,
            history.events.num_clears,
        )
        if mirror is self._shown_mirror and state == self._shown_state:
            return
        self._shown_mirror, self._shown_state = mirror, state
        if not mirror.capabilities.requests:
            self.numbers.show_numbers(mirror)
            self.stack.setCurrentIndex(2)
            return
        columns = at_moment(requests.log.columns(), mirror, self.session.timeline.cursor_ns)
        self.model.show_columns(columns, mirror.epoch or 0)
        self.table.show_columns_in_use()
        self._show_note()
        is_empty = not self.model.num_requests and not len(history.events) and requests.share >= 1
        self.stack.setCurrentIndex(0 if is_empty else 1)
        self._show_count()
        self._select_pending()
        self.detail.refresh()
        self._show_plots()

    def draw_all(self) -> None:
        self._shown_state = ()
        self.refresh()

    @property
    def is_loaded(self) -> bool:
        return self.session.requests.share >= 1

    def restore_settings(self, settings: QSettings) -> None:
        self.goals.setText(str(settings.value(REQUEST_GOALS, "")))
        self._on_goals()

    def save_settings(self, settings: QSettings) -> None:
        settings.setValue(REQUEST_GOALS, goals_text(self.model.goals))

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        self._shown_state = ()
        self.model.theme = theme
        self.table.apply_theme(theme)
        self.detail.apply_theme(theme)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._lay_out_detail()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.FontChange and self._is_built:
            self._lay_out_detail()

    def _lay_out_detail(self) -> None:
        is_low = self.width() >= scaled(_MIN_WIDTH_SIDE_BY_SIDE) and self.height() < scaled(_LOW_HEIGHT)
        orientation = Qt.Orientation.Horizontal if is_low else Qt.Orientation.Vertical
        if self.splitter.orientation() is not orientation:
            self.splitter.setOrientation(orientation)
            self._is_split_by_user = False
        if not self._is_split_by_user:
            self._split()

    def _split(self) -> None:
        """Divide the space between the table and the panel with details.

        The table gets three fifths. Exceptions: next to the table, the panel gets only a quarter of the width while the
        user wants no details. Below the table in a low window, the panel gets half of the height if the user wants
        details, otherwise only the height of its tabs.
        """
        if self.splitter.orientation() is Qt.Orientation.Horizontal:
            detail = self.width() * 2 // 5 if self._is_detail_wanted else self.width() // 4
            self.splitter.setSizes([self.width() - detail, detail])
            return
        total_height, rows = self.splitter.height(), self.table.height_of(_MIN_ROWS)
        tabs = self.detail.minimumSizeHint().height()
        if total_height * 3 // 5 >= rows:
            table = total_height * 3 // 5
        elif self._is_detail_wanted:
            table = total_height // 2
        else:
            table = total_height - tabs
        self.splitter.setSizes([table, total_height - table])

    def _set_detail_wanted(self, is_wanted: bool) -> None:
        if is_wanted != self._is_detail_wanted:
            self._is_detail_wanted = is_wanted
            if not self._is_split_by_user:
                self._split()

    def _on_splitter_moved(self) -> None:
        self._is_split_by_user = True

    def confirm_abort(self) -> None:
        """Abort the current request if it has not ended and the user confirms."""
        row = self.table.currentIndex().row()
        if row < 0 or not self.model.is_active(row):
            return
        request_id = self.model.request_id_at(row)
        question = f"Abort request {request_id}? Tokens generated so far are kept."
        confirm(self, question, "Abort", partial(self._abort, request_id))

    def _abort(self, request_id: str) -> None:
        try:
            self.session.send(Abort(request_id=request_id))
        except KvscopeError as error:
            self.count.setText(str(error))

    def _on_row_chosen(self) -> None:
        if self._is_reordering:
            return
        rows = sorted({index.row() for index in self.table.selectionModel().selectedRows()})
        if len(rows) == 1:
            self._choose(rows[0])
            return
        self._pending_selection = None
        shown = [row for row in rows if self.model.epoch_at(row) == self.model.epoch]
        numbers = [number for row in shown if (number := self.model.number_at(row)) is not None]
        self.session.selection.select_batch(tuple(sorted(numbers)))

    def _choose(self, row: int) -> None:
        """Select the request in table row `row`. If the state shown does not contain the request, move the cursor to a
        time at which the request existed.
        """
        number, key = self.model.number_at(row), self.model.key_at(row)
        if number is None or key is None:
            return
        mirror, timeline = self.session.mirror, self.session.timeline
        is_shown_start = self.model.epoch_at(row) == mirror.epoch
        is_known = is_shown_start and mirror.requests.row_of(number) is not None
        if is_shown_start:
            self.session.selection.select_request(number)
        if not (is_known if timeline.is_live else self.model.is_active(row)):
            self._pending_selection = (self.model.epoch_at(row), number)
            self._go_to(key, number, "first_token_ns", "started_ns", "arrival_ns")

    def _go_to(self, key: int, number: int, *moments: str) -> None:
        """Move the cursor to the first of the request's `moments` (keys of `MOMENTS`) whose time is known, and show a
        message about it.
        """
        times = self.session.requests.log.times(key)
        known_moments = [name for name in moments if getattr(times, name, None) is not None]
        if known_moments:
            time_ns = getattr(times, known_moments[0])
            self.session.timeline.go_to(time_ns)
            text = f"Moved to {clock_text(time_ns)}, the {MOMENTS[known_moments[0]]} of #{count(number)}."
            self.session.noticed.emit(text)

    def _on_moment_requested(self, moment: str) -> None:
        row = self.table.currentIndex().row()
        key, number = self.model.key_at(row), self.model.number_at(row)
        if key is not None and number is not None:
            self._pending_selection = (self.model.epoch_at(row), number)
            self._go_to(key, number, moment)

    def _on_client_requested(self) -> None:
        row = self.table.currentIndex().row()
        if row >= 0:
            self.search.setText(f"client {self.model.client_at(row)}")

    def _select_pending(self) -> None:
        if self._pending_selection is not None and self._pending_selection[0] == self.session.mirror.epoch:
            number, self._pending_selection = self._pending_selection[1], None
            self.session.selection.select_request(number)

    def _on_key_chosen(self, key: int) -> None:
        row = self.model.row_with(key)
        if row is not None:
            self.table.selectRow(row)
            self.table.scrollTo(self.model.index(row, 0))

    def _on_reordering(self) -> None:
        self._is_reordering = True

    def _on_reordered(self) -> None:
        self._show_selection(scroll=False)
        self._is_reordering = False

    def _on_selection_changed(self) -> None:
        self._set_detail_wanted(self.session.selection.request is not None)
        self._show_selection(scroll=True)
        self.detail.refresh()

    def _show_selection(self, *, scroll: bool) -> None:
        number = self.session.selection.request
        row = None if number is None else self.model.row_of(number)
        selection = self.table.selectionModel()
        if row is None:
            self._show_batch(selection)
            return
        index = self.model.index(row, 0)
        if selection.currentIndex().row() != row or not selection.isRowSelected(row):
            flags = QItemSelectionModel.SelectionFlag
            selection.setCurrentIndex(index, flags.ClearAndSelect | flags.Rows)
        if scroll:
            self.table.scrollTo(index)

    def _show_batch(self, selection: QItemSelectionModel) -> None:
        rows = [row for number in self.session.selection.batch if (row := self.model.row_of(number)) is not None]
        rows_selection, last = QItemSelection(), self.model.columnCount() - 1
        for row in rows:
            rows_selection.select(self.model.index(row, 0), self.model.index(row, last))
        was_reordering, self._is_reordering = self._is_reordering, True  # the selection below is not the user's
        selection.clearCurrentIndex()
        selection.select(rows_selection, QItemSelectionModel.SelectionFlag.ClearAndSelect)
        self._is_reordering = was_reordering

    def _on_requests_changed(self) -> None:
        now_s = time.monotonic()
        if not is_on_screen(self):
            return
        if self.session.requests.share < 1 and now_s - self._refreshed_s < _READING_REFRESH_S:
            self._show_count()
            return
        self._refreshed_s = now_s
        self.refresh()

    def _on_filter(self) -> None:
        chosen_filter, visible_span = Filter(self.filter.currentText()), self.session.timeline.shared_zoom.span
        self.model.set_query(
            replace(self.model.query, filter=chosen_filter, text=self.search.text(), visible_span=visible_span)
        )
        self.goals.setVisible(chosen_filter is Filter.MISSED)
        self._show_count()
        self._show_plots()

    def _on_goals(self) -> None:
        try:
            goals, self._goals_error = read_goals(self.goals.text().split(), "Goal"), ""
        except BadInput as error:
            self._goals_error = str(error)
        else:
            self.model.set_query(replace(self.model.query, goals=goals))
            self.detail.refresh()
        self.goals.setToolTip(plain_tip(self._goals_error or _GOALS_TIP))
        self._show_count()

    def _show_count(self) -> None:
        requests, model = self.session.requests, self.model
        if requests.share < 1:
            self.count.setText(f"Reading requests: {requests.share:.0%}")
        elif requests.failure:
            self.count.setText(f"Not all requests can be read: {requests.failure}")
        elif model.query.filter is Filter.MISSED:
            self.count.setText(
                "Not accepted; write it as ttft:200" if self._goals_error else _goodput_text(model.judged)
            )
        else:
            self.count.setText(self._count_text())

    def _count_text(self) -> str:
        shown, num_known = self.model.rowCount(), self.model.num_requests
        states = {
            "running": self.model.num_in(RequestState.RUNNING),
            "waiting": self.model.num_in(RequestState.WAITING, RequestState.PREEMPTED),
        }
        states_text = "".join(f", {count(number)} {name}" for name, number in states.items() if number)
        requests = plural(num_known, "request")
        return f"{requests}{states_text}" if shown == num_known else f"{count(shown)} of {requests}"

    def _show_note(self) -> None:
        note = queue_text(self.session.mirror, self.session.history.events, self.session.history.wall_ns(0))
        if note != self.note.text():
            self.note.setText(note)
        self.note.setVisible(bool(note))

    def _waiting_reason(self, number: int) -> str:
        return why_waits(self.session.mirror, number)

    def _delay_reason(self, key: int) -> str:
        log = self.session.requests.log
        reason, version = self._reasons.get(key, ("", -2))
        if version in (-1, log.version):
            return reason
        version, reason, times = log.version, log.reason(key), log.times(key)
        if len(self._reasons) >= _MAX_REASONS:
            self._reasons.clear()
        has_ended = times is not None and times.ended_ns is not None and self.session.requests.share >= 1
        self._reasons[key] = reason, -1 if has_ended else version
        return reason

    def _delays_of_number(self, number: int) -> tuple[str, ...]:
        key = self.model.key_of(number)
        return () if key is None else self.session.requests.log.chain(key)

    def _delay_of_number(self, number: int) -> str:
        key = self.model.key_of(number)
        return "" if key is None else self._delay_reason(key)

    def _show_plots(self) -> None:
        columns, plots = self.model.columns, self.detail.plots
        if columns is not None and plots.isVisible():
            plots.show_requests(columns, self.model.shown_rows)

    def _on_event_chosen(self, epoch: int, number: int) -> None:
        if epoch == self.session.mirror.epoch and self.model.key_of(number) is not None:
            row = self.model.row_of(number)
            if row is None:
                self.session.selection.select_request(number)
            else:
                self._choose(row)

    def _connect(self) -> None:
        self.model.reordering.connect(self._on_reordering)
        self.model.reordered.connect(self._on_reordered)
        self.session.selection.changed.connect(self._on_selection_changed)
        self.table.row_chosen.connect(self._on_row_chosen)
        self.table.abort_requested.connect(self.confirm_abort)
        self.table.client_requested.connect(self._on_client_requested)
        self.table.moment_requested.connect(self._on_moment_requested)
        self.detail.plots.request_chosen.connect(self._on_key_chosen)
        self.detail.currentChanged.connect(self._show_plots)
        self.session.requests_changed.connect(self._on_requests_changed)
        self.detail.request_chosen.connect(self._on_event_chosen)
        self.filter.currentIndexChanged.connect(self._on_filter)
        self.goals.editingFinished.connect(self._on_goals)
        self.session.timeline.shared_zoom.changed.connect(self._on_filter)
        self.search.textChanged.connect(self._on_filter)

    def _lay_out(self) -> None:
        bar = FlowLayout(self.filter, self.goals, self.search, self.count, margins=QMargins(8, 6, 8, 4))
        self.splitter = QSplitter(Qt.Orientation.Vertical)
        self.splitter.addWidget(self.table)
        self.splitter.addWidget(self.detail)
        self.splitter.setStretchFactor(0, 3)
        self.splitter.setStretchFactor(1, 2)
        self.splitter.splitterMoved.connect(self._on_splitter_moved)
        self.detail.tabBarClicked.connect(lambda _: self._set_detail_wanted(True))
        self.detail.currentChanged.connect(lambda _: self._set_detail_wanted(True))  # also reached by keyboard
        body = QWidget()
        column = QVBoxLayout(body)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(head_row(bar))
        note_row = QHBoxLayout()
        note_row.setContentsMargins(10, 0, 10, 0)
        note_row.addWidget(self.note)
        column.addLayout(note_row)
        column.addWidget(self.splitter, 1)
        self.stack = QStackedLayout(self)
        self.stack.addWidget(empty_state(EMPTY_RECORDING if self.session.timeline.is_file else EMPTY_TEXT))
        self.stack.addWidget(body)
        self.stack.addWidget(self.numbers)


def _goodput_text(judged: GoalResults | None) -> str:
    if judged is None:
        return "No goals set"
    missed = int(np.count_nonzero(judged.missed))
    share = "goodput unknown" if judged.goodput is None else f"goodput {judged.goodput:.1%}"
    return f"{share} of {plural(judged.num_judged, 'finished request')}, {count(missed)} missed"
