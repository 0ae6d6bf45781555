"""Panel with the selected block's history: a strip over time above a list of events. A click moves the cursor."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QGuiApplication, QKeyEvent, QKeySequence, QResizeEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QHeaderView, QVBoxLayout, QWidget

from kvscope_app.session.session import Session
from kvscope_app.ui.number_text import percent, plural
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import label, set_icon, tool_button
from kvscope_app.ui.widgets import ElidedLabel
from kvscope_app.views.inspector.block_history import BlockHistory, known_text
from kvscope_app.views.inspector.block_history_strip import BlockHistoryStrip
from kvscope_app.views.inspector.moment_model import DESCRIPTION_COLUMN, MomentModel
from kvscope_app.views.table import RowTable
from kvscope_telemetry.block_texts.block_texts import BlockTextLookup
from kvscope_telemetry.summaries.block_moments import BlockMoment, MomentKind

_MIN_WIDTH_FOR_STEPS: Final = 380
_KINDS_WITH_TEXT: Final = (MomentKind.FILLED, MomentKind.KNOWN, MomentKind.REUSED, MomentKind.LOADED, MomentKind.IDLE)
"""Kinds of moments whose row in the list includes the block's text."""


class MomentTable(RowTable):
    """List of what happened to a block. Enter or a click moves the cursor to the time of the row; Ctrl+C copies."""

    chosen = Signal(object)

    def __init__(self, model: MomentModel) -> None:
        super().__init__("Block history", is_multi_select=True)
        self._moments = model
        self.setModel(model)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.fix_row_heights(7)
        self.horizontalHeader().setSectionResizeMode(DESCRIPTION_COLUMN, QHeaderView.ResizeMode.Stretch)
        self.setColumnWidth(0, self.fontMetrics().horizontalAdvance("00:00:00.000") + 18)
        self.setColumnWidth(2, self.fontMetrics().horizontalAdvance("1 000 000") + 14)
        self.clicked.connect(lambda index: self._go_to(index.row()))

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.Copy):
            self.copy()
        elif event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self._go_to(self.currentIndex().row())
        else:
            super().keyPressEvent(event)

    def copy(self) -> str:
        """Copy the selected rows, or all if none is selected, as tab-separated lines, oldest first. Return the text."""
        rows = {index.row() for index in self.selectedIndexes()} or set(range(self._moments.rowCount()))
        moments = [moment for row in sorted(rows, reverse=True) if (moment := self._moments.moment_at(row)) is not None]
        text = "\n".join("\t".join(self._moments.text(moment, column) for column in (0, 2, 1)) for moment in moments)
        if text:
            QGuiApplication.clipboard().setText(text)
        return text

    def minimumSizeHint(self) -> QSize:
        return QSize(60, 40)

    def _go_to(self, row: int) -> None:
        moment = self._moments.moment_at(row)
        is_single = len(self.selectionModel().selectedRows()) <= 1  # several rows are selected for copying
        if moment is not None and is_single:
            self.chosen.emit(moment.time_ns)


class BlockHistoryPanel(QWidget):
    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self.history = BlockHistory(session, self)
        self.strip = BlockHistoryStrip()
        self.model = MomentModel(self)
        self.model.text_of = self._text_of
        session.texts.arrived.connect(self._on_texts)
        self.table = MomentTable(self.model)
        self.heading = label("Block history", "heading")
        self.note = ElidedLabel()
        self.note.setProperty("look", "muted")
        self.fit = tool_button("Fit", "Show the whole known history (double-click)")
        for widget in (self.strip, self.table):
            widget.chosen.connect(self._go_to)
        self.fit.clicked.connect(self.strip.fit)
        self.table.verticalScrollBar().valueChanged.connect(self._request_texts)
        self._lay_out()

    def show_block(self, block: int | None) -> None:
        if block != self.history.block:
            self.strip.fit()
            self._session.texts.request(self, ())
        self.history.set_block(block)

    def refresh(self) -> None:
        mirror = self._session.mirror
        if mirror.hello is None:
            return
        self.history.follow_cursor()
        part, cursor_ns = self.history.part, self._session.timeline.cursor_ns
        self.strip.show_part(part, mirror.hello.cache.block_size, cursor_ns)
        self.model.show_moments(() if part is None else part.moments)
        if self.model.show_cursor(cursor_ns) and not self.table.hasFocus():
            self.table.scrollTo(self.model.index(self.model.current_row, 0))
        self.note.setText(self._note_text())
        self._request_texts()

    def apply_theme(self, theme: Theme) -> None:
        self.strip.apply_theme(theme)
        self.model.theme = theme
        self.table.viewport().update()
        set_icon(self.fit, "fit", theme)

    def close_history(self) -> None:
        self.history.close()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.table.setColumnHidden(2, self.width() < _MIN_WIDTH_FOR_STEPS)

    def _request_texts(self) -> None:
        first, last = self.table.rowAt(0), self.table.rowAt(self.table.viewport().height() - 1)
        rows = range(max(first, 0), (self.model.rowCount() if last < 0 else last + 1) if first >= 0 else 0)
        moments = (self.model.moment_at(row) for row in rows)
        lookups = (self._text_lookup(moment) for moment in moments if moment is not None)
        self._session.texts.request(self, [lookup for lookup in lookups if lookup is not None])

    def _text_lookup(self, moment: BlockMoment) -> BlockTextLookup | None:
        block = self.history.block
        if block is None or moment.kind not in _KINDS_WITH_TEXT or not moment.hash:
            return None
        return BlockTextLookup(moment.epoch, block, moment.request, moment.filled, moment.hash)

    def _text_of(self, moment: BlockMoment) -> str:
        lookup = self._text_lookup(moment)
        content = None if lookup is None else self._session.texts.get(lookup)
        return "" if content is None else content.text

    def _on_texts(self) -> None:
        if self.isVisible():
            self.model.update_texts()

    def _note_text(self) -> str:
        history, part = self.history, self.history.part
        if history.is_reading:
            return f"Reading history… {percent(history.share, 0)}"
        if part is None or not part.rows.size:
            return history.failure
        text = f"{plural(len(part.moments), 'event')}, {known_text(part)}"
        return f"{text}. {history.failure}" if history.failure else text

    def _go_to(self, time_ns: int) -> None:
        self._session.timeline.go_to(time_ns)

    def _lay_out(self) -> None:
        head = QHBoxLayout()
        head.setContentsMargins(10, 4, 6, 2)
        head.setSpacing(8)
        head.addWidget(self.heading)
        head.addWidget(self.note, 1)
        head.addWidget(self.fit)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addLayout(head)
        column.addWidget(self.strip)
        column.addWidget(self.table, 1)
