"""Panel with a question about past requests, a button that simulates them, and the answer.

Owns what the user chose and the last answer. The questions and their values depend on the engine's configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from PySide6.QtCore import QMargins, Qt
from PySide6.QtGui import QStandardItemModel
from PySide6.QtWidgets import (
    QComboBox,
    QFrame,
    QGridLayout,
    QLabel,
    QProgressBar,
    QPushButton,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)

from kvscope_app.session.session import Session
from kvscope_app.ui.flow_layout import FlowLayout
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.widget_factories import combo_box, label, label_boxes, number_label, set_look
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.base import HINT
from kvscope_app.views.what_if.comparison_answer import (
    HEADER,
    HEADER_TIPS,
    basis,
    figure_rows,
    reliability,
    verdict,
)
from kvscope_app.views.what_if.question_process import QuestionProcess
from kvscope_app.views.what_if.questions import SettingChange, setting_changes, why_no_questions
from kvscope_telemetry.messages.telemetry import Hello
from kvscope_telemetry.messages.what_if_question import WhatIfComparison

TIP: Final = (
    "Simulates the requests seen so far with the engine's own scheduler, as they were and with the change. No model"
    " runs, and the engine is not changed."
)
_STEPS: Final = 1000
_MIN_BOX_WIDTH: Final = 90
_MAX_TABLE_WIDTH: Final = 860


class QuestionPanel(QFrame):
    def __init__(self, session: Session, parent: QWidget | None = None, command: Sequence[str] | None = None) -> None:
        """Create the panel. `command` is passed to `QuestionProcess`."""
        super().__init__(parent)
        self.setProperty("look", "card")
        self.setProperty(HINT, True)  # without an answer, pictures do not show the panel
        self._session = session
        self._hello: Hello | None = None
        self._changes: list[SettingChange] = []
        self._title = ""
        """Title of the question that is being answered."""
        self.process = QuestionProcess(session, self, command)
        self.process.progressed.connect(self._on_progress)
        self.process.answered.connect(self._on_answer)
        self.process.failed.connect(self._on_failure)
        self.change_box = combo_box([], "What would be different")
        self.value_box = combo_box([], "New value")
        for box in (self.change_box, self.value_box):
            box.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToContents)
            box.setMinimumWidth(scaled(_MIN_BOX_WIDTH))
        self.run_button = QPushButton("Run")
        self.run_button.setProperty("look", "primary")
        self.run_button.setToolTip(TIP)
        self.cancel_button = QPushButton("Cancel")
        self.bar = QProgressBar(maximum=_STEPS, textVisible=False)
        self.bar.setAccessibleName("Progress of the simulation")
        self.message = label("", "muted", wraps=True)
        self.answer = ComparisonTable()
        self._lay_out()
        self.change_box.currentIndexChanged.connect(self._on_change_selected)
        self.run_button.clicked.connect(self.run)
        self.cancel_button.clicked.connect(self.cancel)
        self._show_busy(False)
        self.refresh()

    def refresh(self) -> None:
        """Update the questions to the engine's configuration, and whether they can be asked."""
        hello = self._session.mirror.hello
        has_recording = self._session.timeline.is_file or self._session.disk_history is not None
        reason = why_no_questions(hello, has_recording=has_recording)
        is_possible = not reason and hello is not None
        for widget in (self.change_box, self.value_box, self.run_button):
            widget.setEnabled(is_possible and not self.process.is_busy)
        self.run_button.setToolTip(plain_tip(reason or TIP))
        if reason:
            self._show_message(f"{reason}.")
        elif self._hello is None:
            self._show_message("")
        if hello is not None and (self._hello is None or hello.cache != self._hello.cache):
            self._hello = hello
            self._show_changes(setting_changes(hello))

    def run(self) -> None:
        """Simulate the selected change. Does nothing while a simulation runs, or if the question cannot be answered."""
        index = self.change_box.currentIndex()
        if self.process.is_busy or not self.run_button.isEnabled() or not 0 <= index < len(self._changes):
            return
        value = self._changes[index].values[max(0, self.value_box.currentIndex())]
        self._title = value.title
        self.answer.hide()
        self.bar.setValue(0)
        self._show_message("Simulating the recorded requests, as they were and with the change…")
        self._show_busy(True)
        self.process.ask(value.options)

    def cancel(self) -> None:
        self.process.close()
        self._show_busy(False)
        self._show_message("Cancelled.")

    def close_process(self) -> None:
        self.process.close()

    def _on_progress(self, share_done: float) -> None:
        self.bar.setValue(round(share_done * _STEPS))

    def _on_answer(self, comparison: WhatIfComparison) -> None:
        self._show_busy(False)
        self._show_message("")
        self.setProperty(HINT, False)
        self.answer.show_comparison(self._title, comparison)
        self.answer.show()

    def _on_failure(self, reason: str) -> None:
        self._show_busy(False)
        self._show_message(reason, is_warning=True)

    def _on_change_selected(self, index: int) -> None:
        self.value_box.clear()
        if 0 <= index < len(self._changes):
            labels = [value.label for value in self._changes[index].values]
            self.value_box.addItems(labels)
            self.value_box.setVisible(any(labels))

    def _show_changes(self, changes: list[SettingChange]) -> None:
        self._changes = changes
        self.change_box.clear()
        model = self.change_box.model()
        assert isinstance(model, QStandardItemModel), "a combo box that was filled with texts"
        for row, change in enumerate(changes):
            self.change_box.addItem(f"{change.label} ({change.reason})" if change.reason else change.label)
            model.item(row).setEnabled(not change.reason)
        self.change_box.setCurrentIndex(next((row for row, change in enumerate(changes) if not change.reason), -1))

    def _show_busy(self, is_busy: bool) -> None:
        self.bar.setVisible(is_busy)
        self.cancel_button.setVisible(is_busy)
        self.run_button.setVisible(not is_busy)
        self.change_box.setEnabled(not is_busy)
        self.value_box.setEnabled(not is_busy)

    def _show_message(self, text: str, *, is_warning: bool = False) -> None:
        set_look(self.message, "warning" if is_warning else "muted")
        self.message.setText(text)
        self.message.setVisible(bool(text))

    def _lay_out(self) -> None:
        question = QWidget()
        space = QWidget()  # takes the rest of the line, so that the button stays at the end of the question
        space.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        question.setLayout(
            FlowLayout(
                label("Would", "heading"),
                self.change_box,
                self.value_box,
                label("have helped?", "heading"),
                self.run_button,
                self.cancel_button,
                space,
                margins=QMargins(),
            )
        )
        label_boxes(question)
        column = QVBoxLayout(self)
        column.setContentsMargins(11, 8, 11, 9)
        column.setSpacing(6)
        for widget in (question, self.bar, self.message, self.answer):
            column.addWidget(widget)
        self.answer.hide()


class ComparisonTable(QWidget):
    """Answer: verdict, reliability, and a table of the measured and simulated figures."""

    def __init__(self) -> None:
        super().__init__()
        self.title = label("", "muted", wraps=True)
        self.verdict = label("", "heading", wraps=True)
        self.verdict.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.reliability = label("", "muted", wraps=True)
        self.basis = label("", "muted", wraps=True)
        table = QWidget()
        table.setMaximumWidth(scaled(_MAX_TABLE_WIDTH))
        self._grid = QGridLayout(table)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(14)
        self._grid.setVerticalSpacing(3)
        for index in range(len(HEADER)):
            self._grid.setColumnStretch(index, 1 if index else 2)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(5)
        column.addWidget(self.title)
        column.addWidget(self.verdict)
        column.addWidget(self.reliability)
        column.addWidget(table)
        column.addWidget(self.basis)

    def show_comparison(self, title: str, comparison: WhatIfComparison) -> None:
        self.title.setText(f"{title[:1].upper()}{title[1:]}:")
        self.verdict.setText(verdict(comparison))
        self.reliability.setText(reliability(comparison))
        set_look(self.reliability, "muted" if comparison.is_reliable else "warning")
        self.basis.setText(basis(comparison))
        self._show_rows(comparison)

    def cell_texts(self) -> list[list[str]]:
        """Return the texts of the table, row by row, with the header."""
        return [
            [self._label_at(row, column).text() for column in range(len(HEADER))]
            for row in range(self._grid.rowCount())
        ]

    def _label_at(self, row: int, column: int) -> QLabel:
        item = self._grid.itemAtPosition(row, column)
        widget = None if item is None else item.widget()
        assert isinstance(widget, QLabel), "the table has labels only"
        return widget

    def _show_rows(self, comparison: WhatIfComparison) -> None:
        if not self._grid.count():
            self._add_labels(1 + len(figure_rows(comparison)))
        for row, figure_row in enumerate(figure_rows(comparison), 1):
            for column, text in enumerate(figure_row.cells):
                self._label_at(row, column).setText(text)
            set_look(self._label_at(row, len(HEADER) - 1), {1: "accent", -1: "warning", 0: "muted"}[figure_row.effect])

    def _add_labels(self, num_rows: int) -> None:
        for row in range(num_rows):
            for column, (header, tip) in enumerate(zip(HEADER, HEADER_TIPS, strict=True)):
                cell = number_label() if column else label()
                cell.setWordWrap(True)
                if not row:
                    cell.setText(header)
                    cell.setToolTip(plain_tip(tip))
                if not row or not column:
                    cell.setProperty("look", "muted")
                self._grid.addWidget(cell, row, column)
