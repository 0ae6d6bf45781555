"""The dialog "Plan memory": a form on the left, and on the right its result, recomputed when the form changes."""

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
"""Delay from the last change of the form to computing a plan, so that a typed number causes one plan, not one per
digit.
"""
_FORM_WIDTH: Final = 310


class PlanDialog(Sheet):
    """Non-modal dialog that shows memory plans. `process` computes them; the caller owns it."""

    def __init__(self, parent: QWidget, theme: Theme, model: str, process: PlanProcess) -> None:
        super().__init__("Plan memory", parent)
        self.process = process
        self._shown_question: Question | None = None
        self.form, self.view = PlanForm(model), PlanView(theme)
        self.column.addWidget(
            label(
                "Estimate a model's GPU memory from its config. Nothing is loaded, and no GPU is needed.",
                "muted",
                wraps=True,
            )
        )
        self.column.addLayout(self._form_and_view(), 1)
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
        """Request a plan for the form's options, unless the last request had the same options."""
        question = self.form.question
        if question == self._shown_question:
            return
        self._shown_question = question
        self.view.show_message("Calculating… The first result can take a few seconds.")
        self.process.request(question)

    def _show_error(self, text: str) -> None:
        self.view.show_message(text, "warning")

    def end(self, *_: object) -> None:
        self._debounce.stop()
        self.process.cancel()

    def _form_and_view(self) -> QHBoxLayout:
        scroll_area = QScrollArea()
        scroll_area.setWidgetResizable(True)
        scroll_area.setFrameShape(QScrollArea.Shape.NoFrame)
        scroll_area.setWidget(self.form)
        min_width = self.form.minimumSizeHint().width() + scroll_area.verticalScrollBar().sizeHint().width()
        scroll_area.setFixedWidth(max(scaled(_FORM_WIDTH), min_width))
        row = QHBoxLayout()
        row.setSpacing(24)
        row.addWidget(scroll_area)
        row.addWidget(self.view, 1)
        return row
