"""Requests: a table of all, and below it the block table and the events of the selected one.

Owns the selection's way between the table and the session, the filter and the abort action.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import numpy as np
from PySide6.QtCore import QEvent, QItemSelection, QItemSelectionModel, QSettings, Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import (
    QComboBox,
    QHBoxLayout,
    QLineEdit,
    QSplitter,
    QStackedLayout,
    QVBoxLayout,
    QWidget,
)

from kvscope_app.look.asking import ask
from kvscope_app.look.makers import empty_state, head_row, label
from kvscope_app.look.number_text import plural
from kvscope_app.look.plain_text import plain_tip
from kvscope_app.look.theme import Theme
from kvscope_app.look.widgets import ElidedLabel
from kvscope_app.look.zoom import scaled
from kvscope_app.session.session import Session
from kvscope_app.setting_names import REQUEST_GOALS
from kvscope_app.views.base import View
from kvscope_app.views.requests.model import RequestModel
from kvscope_app.views.requests.numbers import RequestNumbers
from kvscope_app.views.requests.request_columns import Filter, read_columns
from kvscope_app.views.requests.request_detail import RequestDetail
from kvscope_app.views.requests.requests_table import RequestTable
from kvscope_app.views.requests.waiting_text import queue_note, why_waits
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.goals import GOAL_NAMES, Judged, goals_text, read_goals
from kvscope_telemetry.messages.commands import Abort
from kvscope_telemetry.state.mirror import Mirror

_BESIDE_FROM_WIDTH = 620
_LOW = 400
_ROWS_AT_LEAST = 5
"""Of the table, before the details below it get room that nobody asked for."""
EMPTY_TEXT = "No requests yet.\nSend a prompt from the console, or start the load."
_GOALS_TIP = "\n".join(f"{name}: {meaning}" for name, meaning in GOAL_NAMES.items())
EMPTY_RECORDING = "No requests at this moment of the recording."


class RequestsView(View):
    """The table, the filter above it, the details below."""

    title: ClassVar[str] = "Requests"
    object_name: ClassVar[str] = "requests"
    refresh_hz: ClassVar[float] = 5.0
    _is_built = False

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self.model = RequestModel(self)
        self.model.why = self._why
        self.table = RequestTable(self.model)
        self.detail = RequestDetail(session)
        self.detail.missed = self.model.missed_goals
        self.numbers = RequestNumbers()
        """Instead of both, of an engine that does not tell of each."""
        self.filter = QComboBox()
        self.filter.addItems([wanted.value for wanted in Filter])
        self.filter.setAccessibleName("Filter")
        self.goals = QLineEdit()
        """Seen with the filter that needs them."""
        self.goals.setPlaceholderText("Goals in ms, as ttft:200 tpot:50")
        self.goals.setAccessibleName("Goals in milliseconds")
        self.goals.setToolTip(_GOALS_TIP)
        self.goals.hide()
        self._goals_error = ""
        self.search = QLineEdit()
        self.search.setPlaceholderText("Find by id, number or adapter")
        self.search.setClearButtonEnabled(True)
        self.count = label(look="muted")
        self.note = ElidedLabel()
        """Who waits and who was refused, and why."""
        self.note.setProperty("look", "muted")
        self.note.hide()
        self._is_reordering = False
        self._was_split_by_hand = False
        self._is_detail_wanted = False
        """There is a request to tell of, or the person chose a tab."""
        self._shown_mirror: Mirror | None = None
        self._shown_state: tuple[object, ...] = ()
        self._lay_out()
        self._connect()
        self._is_built = True

    def refresh(self) -> None:
        history, mirror = self.session.history, self.session.mirror
        state = (
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
        self.model.show_columns(read_columns(mirror, history.request_times))
        self.table.show_adapters(self.model.has_adapters)
        self._show_note()
        self.stack.setCurrentIndex(1 if self.model.num_requests or len(history.events) else 0)
        self._show_count()
        self.detail.refresh()

    def recall(self, settings: QSettings) -> None:
        self.goals.setText(str(settings.value(REQUEST_GOALS, "")))
        self._on_goals()

    def remember(self, settings: QSettings) -> None:
        settings.setValue(REQUEST_GOALS, goals_text(self.model.goals))

    def shut_down(self) -> None:
        self.detail.first_tokens.close()

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        self._shown_state = ()
        self.model.theme = theme
        self.table.apply_theme(theme)
        self.detail.apply_theme(theme)

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Details stand beside the table in a wide, low dock, below it otherwise."""
        super().resizeEvent(event)
        self._place_detail()

    def changeEvent(self, event: QEvent) -> None:
        """Larger text needs more room to have both beside each other."""
        super().changeEvent(event)
        if event.type() == QEvent.Type.FontChange and self._is_built:
            self._place_detail()

    def _place_detail(self) -> None:
        is_low = self.width() >= scaled(_BESIDE_FROM_WIDTH) and self.height() < scaled(_LOW)
        orientation = Qt.Orientation.Horizontal if is_low else Qt.Orientation.Vertical
        if self.splitter.orientation() is not orientation:
            self.splitter.setOrientation(orientation)
            self._was_split_by_hand = False
        if not self._was_split_by_hand:
            self._split()

    def _split(self) -> None:
        """Three fifths for the table. Below a low one the details show their tabs alone until somebody wants them."""
        if self.splitter.orientation() is Qt.Orientation.Horizontal:
            self.splitter.setSizes([self.width() * 3 // 5, self.width() * 2 // 5])
            return
        whole, rows = self.splitter.height(), self.table.height_of(_ROWS_AT_LEAST)
        tabs = self.detail.minimumSizeHint().height()
        if whole * 3 // 5 >= rows:
            table = whole * 3 // 5
        elif self._is_detail_wanted:
            table = whole // 2
        else:
            table = whole - tabs
        self.splitter.setSizes([table, whole - table])

    def _want_detail(self, is_wanted: bool) -> None:
        if is_wanted != self._is_detail_wanted:
            self._is_detail_wanted = is_wanted
            if not self._was_split_by_hand:
                self._split()

    def _on_split_by_hand(self) -> None:
        self._was_split_by_hand = True

    def ask_abort(self) -> None:
        """Ask the person, then the engine, to stop the selected request, if it has not ended."""
        row = self.table.currentIndex().row()
        if row < 0 or self.model.is_finished(row):
            return
        request_id = self.model.request_id_at(row)
        question = f"Abort request {request_id}? Tokens generated so far are kept."
        ask(self, question, "Abort", partial(self._abort, request_id))

    def _abort(self, request_id: str) -> None:
        try:
            self.session.send(Abort(request_id=request_id))
        except KvscopeError as error:
            self.count.setText(str(error))

    def _on_row_chosen(self) -> None:
        number = self.model.number_at(self.table.currentIndex().row())
        if number is not None and not self._is_reordering:
            self.session.select_request(number)

    def _on_reordering(self) -> None:
        self._is_reordering = True

    def _on_reordered(self) -> None:
        self._show_selection(scroll=False)
        self._is_reordering = False

    def _on_selection_changed(self) -> None:
        self._want_detail(self.session.selected_request is not None)
        self._show_selection(scroll=True)
        self.detail.refresh()

    def _show_selection(self, *, scroll: bool) -> None:
        """Select the row that holds the session's request now; rows move as the table is sorted anew."""
        number = self.session.selected_request
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
        """The rows of a step's requests, or none."""
        rows = [row for number in self.session.selected_batch if (row := self.model.row_of(number)) is not None]
        chosen, last = QItemSelection(), self.model.columnCount() - 1
        for row in rows:
            chosen.select(self.model.index(row, 0), self.model.index(row, last))
        was_reordering, self._is_reordering = self._is_reordering, True  # nobody chose a row
        selection.clearCurrentIndex()
        selection.select(chosen, QItemSelectionModel.SelectionFlag.ClearAndSelect)
        self._is_reordering = was_reordering

    def _on_filter(self) -> None:
        self.model.set_filter(Filter(self.filter.currentText()), self.search.text())
        self.goals.setVisible(self.model.filter is Filter.MISSED)
        self._show_count()

    def _on_goals(self) -> None:
        try:
            goals, self._goals_error = read_goals(self.goals.text().split(), "Goal"), ""
        except BadInput as error:
            self._goals_error = str(error)
        else:
            self.model.set_goals(goals)
            self.detail.refresh()
        self.goals.setToolTip(plain_tip(self._goals_error or _GOALS_TIP))
        self._show_count()

    def _show_count(self) -> None:
        if self.model.filter is Filter.MISSED:
            self.count.setText(
                "Not accepted; write it as ttft:200" if self._goals_error else _goodput_text(self.model.judged)
            )
            return
        shown, there = self.model.rowCount(), self.model.num_requests
        self.count.setText(plural(there, "request") if shown == there else f"{shown} of {plural(there, 'request')}")

    def _show_note(self) -> None:
        note = queue_note(self.session.mirror, self.session.history.events, self.session.history.wall_ns(0))
        if note != self.note.text():
            self.note.setText(note)
        self.note.setVisible(bool(note))

    def _why(self, number: int) -> str:
        return why_waits(self.session.mirror, number)

    def _on_event_chosen(self, epoch: int, number: int) -> None:
        if epoch == self.session.mirror.epoch and self.session.mirror.requests.row_of(number) is not None:
            self.session.select_request(number)

    def _connect(self) -> None:
        self.model.reordering.connect(self._on_reordering)
        self.model.reordered.connect(self._on_reordered)
        self.session.selection_changed.connect(self._on_selection_changed)
        self.table.row_chosen.connect(self._on_row_chosen)
        self.table.abort_wanted.connect(self.ask_abort)
        self.detail.request_chosen.connect(self._on_event_chosen)
        self.filter.currentIndexChanged.connect(self._on_filter)
        self.goals.editingFinished.connect(self._on_goals)
        self.search.textChanged.connect(self._on_filter)

    def _lay_out(self) -> None:
        bar = QHBoxLayout()
        bar.setContentsMargins(8, 6, 8, 4)
        bar.setSpacing(8)
        bar.addWidget(self.filter)
        bar.addWidget(self.goals, 1)
        bar.addWidget(self.search, 1)
        bar.addWidget(self.count)
        self.splitter = QSplitter(Qt.Orientation.Vertical)
        self.splitter.addWidget(self.table)
        self.splitter.addWidget(self.detail)
        self.splitter.setStretchFactor(0, 3)
        self.splitter.setStretchFactor(1, 2)
        self.splitter.splitterMoved.connect(self._on_split_by_hand)
        self.detail.tabBarClicked.connect(lambda _: self._want_detail(True))
        self.detail.currentChanged.connect(lambda _: self._want_detail(True))  # by keys
        body = QWidget()
        column = QVBoxLayout(body)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(head_row(bar))
        noted = QHBoxLayout()
        noted.setContentsMargins(10, 0, 10, 0)
        noted.addWidget(self.note)
        column.addLayout(noted)
        column.addWidget(self.splitter, 1)
        self.stack = QStackedLayout(self)
        self.stack.addWidget(empty_state(EMPTY_RECORDING if self.session.timeline.is_file else EMPTY_TEXT))
        self.stack.addWidget(body)
        self.stack.addWidget(self.numbers)


def _goodput_text(judged: Judged | None) -> str:
    """After a jump in a recording the table has only who was there then: so has this figure."""
    if judged is None:
        return "No goals set"
    missed = int(np.count_nonzero(judged.missed))
    share = "goodput unknown" if judged.goodput is None else f"goodput {judged.goodput:.1%}"
    return f"{share} of {judged.num_judged} in this table, {missed} missed"
