"""View for SQL queries over the session's recorded data: ready questions, an editor, and the result as a table.

Owns the texts and the running query. `QueryRunner` owns the thread and the database.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from PySide6.QtCore import QEvent, QMargins, QModelIndex, QSettings, Qt, QTimer, Signal
from PySide6.QtGui import QKeyEvent, QResizeEvent
from PySide6.QtWidgets import QPlainTextEdit, QSplitter, QVBoxLayout, QWidget

from kvscope_app.session.background import Background
from kvscope_app.session.session import Session
from kvscope_app.setting_names import QUERY_SQL
from kvscope_app.ui.file_dialogs import ask_save
from kvscope_app.ui.flow_layout import FlowLayout
from kvscope_app.ui.fonts import mono
from kvscope_app.ui.number_text import plural
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import (
    combo_box,
    head_row,
    label,
    label_boxes,
    set_icon,
    set_look,
    tool_button,
)
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.base import View
from kvscope_app.views.query.query_runner import QueryRunner
from kvscope_app.views.query.result_model import ResultModel
from kvscope_app.views.table import RowTable
from kvscope_telemetry.exports.kinds import TABLE_NAMES
from kvscope_telemetry.exports.query.ready_questions import READY_QUESTIONS

if TYPE_CHECKING:
    from kvscope_telemetry.exports.query.recording_database import QueryResult

HINT: Final = f"Tables: {', '.join(TABLE_NAMES)}. Ctrl+Enter runs the query."
OWN_QUERY: Final = "Own query"
_POLL_MS: Final = 50
_CLOSE_ATTEMPTS: Final = 40
"""Number of attempts, `_POLL_MS` apart, to stop a query when the window closes."""
_MAX_COLUMN_WIDTH: Final = 420
_STRETCHES: Final = (2, 3)
"""Shares of the editor and of the table."""
_RUN_KEYS: Final = (Qt.Key.Key_Return, Qt.Key.Key_Enter)


class SqlEditor(QPlainTextEdit):
    """Editor in a monospaced font that reports Ctrl+Enter."""

    run_pressed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.document().setDefaultFont(mono())

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() is QEvent.Type.FontChange:  # also by a zoom
            self.document().setDefaultFont(mono())

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in _RUN_KEYS and event.modifiers() & Qt.KeyboardModifier.ControlModifier:
            self.run_pressed.emit()
        else:
            super().keyPressEvent(event)


class QueryView(View):
    title: ClassVar[str] = "Query"
    object_name: ClassVar[str] = "query"
    refresh_hz: ClassVar[float] = 1.0

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self.questions = combo_box([OWN_QUERY, *(question.title for question in READY_QUESTIONS)], "Question")
        self.run = tool_button("Run", "Run the query (Ctrl+Enter)")
        self.cancel = tool_button("Cancel", "Stop the query")
        self.export = tool_button("Export…", "Write all rows of the query to a CSV file")
        self.editor = SqlEditor()
        self.status = label(HINT, "muted", wraps=True)
        self.model = ResultModel(self)
        self.table = RowTable("Result of the query", is_multi_select=True)
        self.table.setModel(self.model)
        self._runner = QueryRunner(session)
        self._work: Background[QueryResult] | None = None
        self._path: Path | None = None
        """File that the running query writes; None if it shows its rows."""
        self._poll_timer = QTimer(self, interval=_POLL_MS)
        self._lay_out()
        self._connect()
        self._update_buttons()
        self.setFocusProxy(self.editor)

    def run_query(self, path: Path | None = None) -> None:
        """Run the editor's SQL and show its rows, or write all of them to `path`. Does nothing while a query runs."""
        sql = self.editor.toPlainText().strip()
        if self._work is not None or not sql:
            return
        self._path = path
        self._work = self._runner.start(sql, path)
        self._show_status("Reading…")
        self._poll_timer.start()
        self._update_buttons()

    def cancel_query(self) -> None:
        if self._work is not None:
            self._runner.cancel(self._work)

    def restore_settings(self, settings: QSettings) -> None:
        self.editor.setPlainText(str(settings.value(QUERY_SQL, READY_QUESTIONS[0].sql)))

    def save_settings(self, settings: QSettings) -> None:
        settings.setValue(QUERY_SQL, self.editor.toPlainText())

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        for button, name in ((self.run, "play"), (self.cancel, "stop")):
            set_icon(button, name, theme)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        is_wide = self.width() > 2 * self.height()  # as at the bottom of the window
        self._splitter.setOrientation(Qt.Orientation.Horizontal if is_wide else Qt.Orientation.Vertical)

    @property
    def is_loaded(self) -> bool:
        return self._work is None

    def shut_down(self) -> None:
        self._poll_timer.stop()
        for _ in range(_CLOSE_ATTEMPTS):
            if self._work is None or self._work.is_finished:
                self._work = None
                self._runner.close()
                return
            self._runner.cancel(self._work)  # repeated, because the query may only be about to begin
            self._work.wait(_POLL_MS / 1000)

    def _poll(self) -> None:
        work = self._work
        if work is None:
            return
        if not work.is_finished:
            if work.is_cancelled:
                self._runner.cancel(work)  # the query may have begun after the last attempt
            share = work.share
            self._show_status(f"Reading… {share:.0%}" if 0 < share < 1 else "Running…" if share else "Reading…")
            return
        self._poll_timer.stop()
        self._work = None
        if work.result is not None:
            self._show_result(work.result)
        else:
            self._show_status(work.failure or "Stopped.", is_failure=bool(work.failure))
        self._update_buttons()

    def _show_result(self, result: QueryResult) -> None:
        num_rows = plural(len(result.rows), "row")
        if self._path is not None:
            self._show_status(f"Exported {num_rows} to {self._path}")
            return
        self.table.horizontalHeader().setSortIndicator(-1, Qt.SortOrder.AscendingOrder)
        self.model.show_result(result)
        self.table.resizeColumnsToContents()
        header = self.table.horizontalHeader()
        for column in range(header.count()):
            self.table.setColumnWidth(column, min(self.table.columnWidth(column), scaled(_MAX_COLUMN_WIDTH)))
        self._show_status(f"The first {num_rows}. Export writes all." if result.has_more else num_rows)

    def _show_status(self, text: str, *, is_failure: bool = False) -> None:
        set_look(self.status, "warning" if is_failure else "muted")
        self.status.setText(text)

    def _update_buttons(self) -> None:
        can_run = self._work is None and bool(self.editor.toPlainText().strip())
        self.run.setEnabled(can_run)
        self.export.setEnabled(can_run)
        self.cancel.setEnabled(self._work is not None)
        self.questions.setEnabled(self._work is None)

    def _choose(self, index: int) -> None:
        if index > 0:
            self.editor.setPlainText(READY_QUESTIONS[index - 1].sql)
            self.run_query()

    def _on_edited(self) -> None:
        sql = self.editor.toPlainText()
        index = next((index for index, each in enumerate(READY_QUESTIONS, 1) if each.sql == sql), 0)
        self.questions.setCurrentIndex(index)
        self._update_buttons()

    def _ask_path(self) -> None:
        ask_save(self, "Export rows", Path("query.csv"), "CSV (*.csv)", lambda path: self.run_query(Path(path)))

    def _select_request(self, current: QModelIndex) -> None:
        number = self.model.value(current.row(), "number") if current.isValid() else None
        if isinstance(number, int) and number > 0:
            self.session.selection.select_request(number)

    def _connect(self) -> None:
        self._poll_timer.timeout.connect(self._poll)
        self.questions.activated.connect(self._choose)
        self.editor.textChanged.connect(self._on_edited)
        self.editor.run_pressed.connect(self.run_query)
        self.run.clicked.connect(lambda: self.run_query())
        self.cancel.clicked.connect(self.cancel_query)
        self.export.clicked.connect(self._ask_path)
        self.table.selectionModel().currentRowChanged.connect(self._select_request)

    def _lay_out(self) -> None:
        self.editor.setAccessibleName("SQL")
        self.editor.setTabChangesFocus(True)
        self.editor.setMinimumHeight(self.editor.fontMetrics().height() * 2)
        self.questions.setMinimumContentsLength(10)
        self.table.fix_row_heights(6)
        self.table.setSortingEnabled(True)
        bar = FlowLayout(self.questions, self.run, self.cancel, self.export, margins=QMargins(), spacing=6)
        self._splitter = QSplitter(Qt.Orientation.Vertical)
        self._splitter.setChildrenCollapsible(False)
        self._splitter.addWidget(self.editor)
        self._splitter.addWidget(self.table)
        for index, stretch in enumerate(_STRETCHES):
            self._splitter.setStretchFactor(index, stretch)
        column = QVBoxLayout(self)
        column.setContentsMargins(10, 8, 10, 8)
        column.setSpacing(6)
        column.addWidget(head_row(bar))
        column.addWidget(self._splitter, 1)
        column.addWidget(self.status)
        label_boxes(self)
