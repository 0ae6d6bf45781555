"""Table of events, with a row of cells or, if it is too narrow, a card for each event."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QEvent, QModelIndex, QObject, QPersistentModelIndex, QPointF, QRect, Qt, Signal
from PySide6.QtGui import (
    QColor,
    QFont,
    QFontMetrics,
    QGuiApplication,
    QKeyEvent,
    QKeySequence,
    QPainter,
    QPaintEvent,
    QPalette,
    QResizeEvent,
    QTextLayout,
    QTextOption,
)
from PySide6.QtWidgets import (
    QAbstractItemView,
    QHeaderView,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
)

from kvscope_app.views.events.event_entries import WHY, EventEntries, why_text
from kvscope_app.views.events.event_lines import to_lines
from kvscope_app.views.table import RowTable

_LINES_BELOW_WIDTH: Final = ((420, 4), (640, 3))
_MIN_LINES: Final = 2
_MARGIN: Final = 8
_GAP: Final = 10
_PADDING: Final = 4
NARROW: Final = 900
"""Width in pixels below which events are shown as cards, as a cause of usual length does not fit into its column."""


class EventTable(RowTable):
    request_chosen = Signal(object, object)
    """Emitted with the epoch and number of the clicked event's request.

    Declared as objects, because Qt's int has 32 bits and an epoch 63.
    """

    entry_chosen = Signal(object)
    _is_built = False

    def __init__(self, model: EventEntries, name: str) -> None:
        super().__init__(name, is_multi_select=False)
        self.setModel(model)
        self.verticalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        self.horizontalHeader().setStretchLastSection(True)
        self.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        metrics = self.fontMetrics()
        for column, sample in enumerate(("00:00:00.000", "preempted", "#12 345")):
            self.setColumnWidth(column, metrics.horizontalAdvance(sample) + 22)
        self._events = model
        self._card = EventCard(model, self)
        self._row_height = 0
        self._has_cards = False
        self._cursor_row = 0
        self._update_arrangement(self.width())
        for signal in (model.rowsInserted, model.rowsRemoved, model.modelReset):
            signal.connect(self._update_row_heights)
        self._is_built = True
        self.activated.connect(self._on_chosen)
        self.clicked.connect(self._on_chosen)

    def show_cursor(self, row: int, *, has_moved: bool) -> None:
        """Draw the session's cursor above `row`, or no cursor if `row` is 0, the newest event.

        A cursor that `has_moved` is scrolled into view. Otherwise new rows do not change the scroll position.
        """
        if row != self._cursor_row:
            self._cursor_row = row
            self.viewport().update()
        if has_moved and self._events.rowCount():
            index = self._events.index(min(row, self._events.rowCount() - 1), WHY)
            if not self.viewport().rect().contains(self.visualRect(index).center()):
                self.scrollTo(index, QAbstractItemView.ScrollHint.PositionAtCenter)

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
        """Scroll down by `num_rows` immediately. Rows that were just added are included in the scroll range."""
        self.updateGeometries()
        self.verticalScrollBar().setValue(self.verticalScrollBar().value() + num_rows)

    def copy_selected(self) -> None:
        rows = sorted({index.row() for index in self.selectionModel().selectedIndexes()})
        entries = [entry for row in rows if (entry := self._events.entry_at(row)) is not None]
        if entries:
            QGuiApplication.clipboard().setText(to_lines((self._events.wall_ns(e), e.event) for e in entries))

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.FontChange and self._is_built:
            self._update_arrangement(self.width())
            self._update_row_heights()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._update_arrangement(self.width())
        self._update_row_heights()

    def scrollContentsBy(self, dx: int, dy: int) -> None:
        super().scrollContentsBy(dx, dy)
        self._update_row_heights()

    def _update_row_heights(self, *_: object) -> None:
        """Set the heights of the visible rows only, because there may be thousands of rows."""
        header, bottom = self.verticalHeader(), self.viewport().height()
        row, width = self.rowAt(0), self.viewport().width()
        while 0 <= row < self._events.rowCount() and self.rowViewportPosition(row) < bottom:
            height = self._card.height(row, self.font(), width) if self._has_cards else self._row_height
            if height != self.rowHeight(row):
                header.resizeSection(row, height)
            row += 1

    def _update_arrangement(self, width: int) -> None:
        """Choose between columns and cards. Cards have the maximum height until they are measured."""
        is_narrow, line = width < NARROW, self.fontMetrics().height()
        height = self._card.max_height(line, width) if is_narrow else line + 6
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


class EventCard(QStyledItemDelegate):
    """Delegate that paints an event as a card: kind, request and time in one line, and the wrapped reason below.

    A card is as high as its reason requires, up to a maximum number of lines. The tooltip has the full reason. The card
    shows all columns of a row, whatever the index's column.
    """

    def __init__(self, model: EventEntries, parent: QObject) -> None:
        super().__init__(parent)
        self._events = model

    @staticmethod
    def max_height(line: int, width: int) -> int:
        return (1 + _max_lines(width)) * line + 2 * _PADDING

    def height(self, row: int, font: QFont, width: int) -> int:
        entry = self._events.entry_at(row)
        text = "" if entry is None else why_text(entry.event)
        num_lines = len(_lines(text, font, width - 2 * _MARGIN, _max_lines(width)))
        return (1 + num_lines) * QFontMetrics(font).height() + 2 * _PADDING

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        entry = self._events.entry_at(index.row())
        if entry is None:
            return
        painter.save()
        box: QRect = option.rect
        palette: QPalette = option.palette
        if option.state & QStyle.StateFlag.State_Selected:
            painter.fillRect(box, palette.highlight())
        inner = box.adjusted(_MARGIN, _PADDING, -_MARGIN, -_PADDING)
        time_text, kind, request = self._events.head(entry)
        theme, line = self._events.theme, QFontMetrics(painter.font()).height()
        x = inner.left()
        is_ahead = self._events.is_ahead(entry)
        text_color = theme.color("muted" if is_ahead else "text")
        for text, color in ((kind, text_color if is_ahead else self._events.kind_color(entry)), (request, text_color)):
            x = _draw_word(painter, QRect(x, inner.top(), inner.right() - x, line), text, color) if text else x
        painter.setPen(theme.color("muted"))
        painter.drawText(QRect(x, inner.top(), inner.right() - x, line), Qt.AlignmentFlag.AlignRight, time_text)
        painter.setPen(text_color)
        _draw_reason(painter, inner.adjusted(0, line, 0, 0), why_text(entry.event))
        painter.setPen(theme.color("border"))
        painter.drawLine(box.bottomLeft(), box.bottomRight())
        painter.restore()


def _max_lines(width: int) -> int:
    return next((lines for limit, lines in _LINES_BELOW_WIDTH if width < limit), _MIN_LINES)


def _draw_word(painter: QPainter, box: QRect, text: str, color: QColor) -> int:
    painter.setPen(color)
    painter.drawText(box, Qt.AlignmentFlag.AlignLeft, text)
    return box.left() + painter.fontMetrics().horizontalAdvance(text) + _GAP


def _lines(text: str, font: QFont, width: int, max_lines: int) -> list[str]:
    """Break `text` into at most `max_lines` lines of `width` pixels. The last line contains all remaining text."""
    layout = QTextLayout(text, font)
    layout.setTextOption(QTextOption(Qt.AlignmentFlag.AlignLeft))
    layout.beginLayout()
    starts: list[int] = []
    while len(starts) < max_lines and (line := layout.createLine()).isValid():
        line.setLineWidth(max(width, 1))
        starts.append(line.textStart())
    layout.endLayout()
    return [text[start:end].strip() for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def _draw_reason(painter: QPainter, box: QRect, text: str) -> None:
    metrics = painter.fontMetrics()
    lines = _lines(text, painter.font(), box.width(), max(1, box.height() // metrics.height()))
    for index, line in enumerate(lines):
        painter.drawText(
            QPointF(box.left(), box.top() + index * metrics.height() + metrics.ascent()),
            metrics.elidedText(line, Qt.TextElideMode.ElideRight, box.width()),
        )
