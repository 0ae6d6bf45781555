"""Events as a table of columns, or where it is too narrow for these as cards. Choosing one tells its request."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QEvent, QModelIndex, Signal
from PySide6.QtGui import QGuiApplication, QKeyEvent, QKeySequence, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QTableView

from kvscope_app.views.events.event_card import EventCard
from kvscope_app.views.events.event_entries import WHY, EventEntries
from kvscope_app.views.events.event_lines import to_lines

NARROW: Final = 900
"""Below this width a reason of usual length (120 to 200 characters) does not fit beside the other columns."""


class EventTable(QTableView):
    """The events; choosing one tells its request."""

    request_chosen = Signal(object, object)
    """Epoch and number: as objects, since a signal's int has 32 bits and an epoch 63."""

    entry_chosen = Signal(object)
    """The event itself."""
    _is_built = False

    def __init__(self, model: EventEntries, name: str) -> None:
        super().__init__()
        self.setAccessibleName(name)
        self.setModel(model)
        self.setShowGrid(False)
        self.setWordWrap(False)
        self.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        self.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        self.setTabKeyNavigation(False)
        self.verticalHeader().hide()
        self.verticalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        self.horizontalHeader().setStretchLastSection(True)
        self.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        digits = self.fontMetrics()
        for column, sample in enumerate(("00:00:00.000", "preempted", "#12 345")):
            self.setColumnWidth(column, digits.horizontalAdvance(sample) + 22)
        self._events = model
        self._card = EventCard(model, self)
        self._row_height = 0
        self._has_cards = False
        self._cursor_row = 0
        self._fit(self.width())
        for changed in (model.rowsInserted, model.rowsRemoved, model.modelReset):
            changed.connect(self._measure)
        self._is_built = True
        self.activated.connect(self._on_chosen)
        self.clicked.connect(self._on_chosen)

    def show_cursor(self, row: int, *, has_moved: bool) -> None:
        """Where the window stands: above `row`; 0 where that is the newest. Once it `has_moved` it is brought in sight:
        rows that come above leave a person's place in the list alone."""
        if row != self._cursor_row:
            self._cursor_row = row
            self.viewport().update()
        if has_moved and self._events.rowCount():
            place = self._events.index(min(row, self._events.rowCount() - 1), WHY)
            if not self.viewport().rect().contains(self.visualRect(place).center()):
                self.scrollTo(place, QAbstractItemView.ScrollHint.PositionAtCenter)

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        rows = self._events.rowCount()
        if not 0 < self._cursor_row <= rows:
            return
        last = self._cursor_row - 1
        y = self.rowViewportPosition(last) + self.rowHeight(last)
        painter = QPainter(self.viewport())
        painter.fillRect(0, y - 1, self.viewport().width(), 2, self._events.theme.color("accent"))
        painter.end()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.Copy):
            self.copy_selected()
            return
        super().keyPressEvent(event)

    def scroll_by(self, num_rows: int) -> None:
        """Further down, at once: rows that were just added count."""
        self.updateGeometries()
        self.verticalScrollBar().setValue(self.verticalScrollBar().value() + num_rows)

    def copy_selected(self) -> None:
        """The chosen rows, as they stand, with tabs."""
        rows = sorted({index.row() for index in self.selectionModel().selectedIndexes()})
        entries = [entry for row in rows if (entry := self._events.entry_at(row)) is not None]
        if entries:
            QGuiApplication.clipboard().setText(to_lines((self._events.wall_ns(e), e.event) for e in entries))

    def changeEvent(self, event: QEvent) -> None:
        """Larger text makes higher cards."""
        super().changeEvent(event)
        if event.type() == QEvent.Type.FontChange and self._is_built:
            self._fit(self.width())
            self._measure()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit(self.width())
        self._measure()

    def scrollContentsBy(self, dx: int, dy: int) -> None:
        super().scrollContentsBy(dx, dy)
        self._measure()

    def _measure(self, *_: object) -> None:
        """Rows that are in sight get the height that they take: of thousands the others need not be measured."""
        header, bottom = self.verticalHeader(), self.viewport().height()
        row, width = self.rowAt(0), self.viewport().width()
        while 0 <= row < self._events.rowCount() and self.rowViewportPosition(row) < bottom:
            height = self._card.height(row, self.font(), width) if self._has_cards else self._row_height
            if height != self.rowHeight(row):
                header.resizeSection(row, height)
            row += 1

    def _fit(self, width: int) -> None:
        """Columns, or where these leave no room for the reason a card an event, each at first as high as it can get."""
        is_narrow, line = width < NARROW, self.fontMetrics().height()
        height = self._card.greatest_height(line, width) if is_narrow else line + 6
        if height == self._row_height:
            return
        self._row_height, self._has_cards = height, is_narrow
        for column in range(WHY):
            self.setColumnHidden(column, is_narrow)
        self.horizontalHeader().setVisible(not is_narrow)
        self.setItemDelegateForColumn(WHY, self._card if is_narrow else None)  # type: ignore[arg-type]
        self.verticalHeader().setDefaultSectionSize(height)

    def _on_chosen(self, index: QModelIndex) -> None:
        entry = self._events.entry_at(index.row())
        if entry is not None:
            self.entry_chosen.emit(entry)
        if entry is not None and entry.event.number:
            self.request_chosen.emit(entry.epoch, entry.event.number)
