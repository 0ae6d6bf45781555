"""The dialog "Plan memory": the form on the left, and on the right its result, which follows changes of the form."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QHBoxLayout, QScrollArea, QWidget

from kvscope_app.planning.plan_form import PlanForm
from kvscope_app.planning.plan_process import PlanProcess, Question
from kvscope_app.planning.plan_view import PlanView
from kvscope_app.ui.sheet import Sheet
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import label
from kvscope_app.ui.zoom import scaled

_DEBOUNCE_MS: Final = 500
"""Milliseconds from the last change to computing a plan, so that typing a number does not start one per digit."""
_FORM_WIDTH: Final = 310


class PlanDialog(Sheet):
    """Dialog that shows memory plans; it is not modal. `process` computes them and belongs to the caller."""

    def __init__(self, parent: QWidget, theme: Theme, model: str, process: PlanProcess) -> None:
        super().__init__("Plan memory", parent)
        self.process = process
        self._shown: Question | None = None
        self.form, self.view = PlanForm(model), PlanView(theme)
        self.column.addWidget(
            label(
                "Estimate a model's GPU memory from its config. Nothing is loaded, and no GPU is needed.",
                "muted",
                wraps=True,
            )
        )
        self.column.addLayout(self._sides(), 1)
        self.add_close()
        self._debounce = QTimer(self, singleShot=True, interval=_DEBOUNCE_MS)
        self._debounce.timeout.connect(self.request)
        self.form.changed.connect(self._debounce.start)
        self.finished.connect(self.end)  # also emitted for Esc, unlike closeEvent
        self.process.answered.connect(self.view.show_answer)
        self.process.failed.connect(self._show_error)
        self.resize_comfortably(980, 720)
        self.request()

    def request(self) -> None:
        """Compute the plan for the form's options, unless they are those of the plan that is shown."""
        question = self.form.question
        if question == self._shown:
            return
        self._shown = question
        self.view.show_message("Calculating… The first result can take a few seconds.")
        self.process.request(question)

    def _show_error(self, text: str) -> None:
        self.view.show_message(text, "warning")

    def end(self, *_: object) -> None:
        """Stop computing plans when the dialog closes."""
        self._debounce.stop()
        self.process.cancel()

    def _sides(self) -> QHBoxLayout:
        left = QScrollArea()
        left.setWidgetResizable(True)
        left.setFrameShape(QScrollArea.Shape.NoFrame)
        left.setWidget(self.form)
        needed = self.form.minimumSizeHint().width() + left.verticalScrollBar().sizeHint().width()
        left.setFixedWidth(max(scaled(_FORM_WIDTH), needed))
        row = QHBoxLayout()
        row.setSpacing(24)
        row.addWidget(left)
        row.addWidget(self.view, 1)
        return row
