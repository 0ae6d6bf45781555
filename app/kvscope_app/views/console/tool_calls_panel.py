"""Panel of an answer's card with its calls of functions, and fields for the results, which continue the chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QPlainTextEdit, QPushButton, QVBoxLayout, QWidget

from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.widget_factories import label
from kvscope_app.views.console.text_body import TextBody
from kvscope_app.views.console.tools import ToolResult, arguments_text
from kvscope_telemetry.messages.commands import ToolCall

_NUM_RESULT_LINES: Final = 2


class ToolCallsPanel(QWidget):
    """Hidden until `show_calls` is called with at least one call."""

    results_sent = Signal(object)
    """Emitted with the results of all calls, a list of `ToolResult`."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[QPlainTextEdit] = []
        self.send = QPushButton("Send result")
        self._calls: tuple[ToolCall, ...] = ()
        self._bodies: list[TextBody] = []
        self._theme: Theme = DARK
        self._can_send = False
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 4, 0, 4)
        self._column.setSpacing(4)
        self._column.addWidget(self.send, 0, Qt.AlignmentFlag.AlignLeft)
        self.send.clicked.connect(self._on_send)
        self.hide()

    def show_calls(self, calls: Sequence[ToolCall]) -> None:
        if tuple(calls) == self._calls:
            return
        self._calls = tuple(calls)
        while self._column.count() > 1:
            item = self._column.takeAt(0)
            if item is not None and (widget := item.widget()) is not None:
                widget.hide()
                widget.deleteLater()
        self.results.clear()
        self._bodies.clear()
        for index, call in enumerate(self._calls):
            body = TextBody(f"Arguments of {call.name}")
            body.apply_theme(self._theme)
            body.show_markdown(f"```json\n{arguments_text(call)}\n```")
            result = QPlainTextEdit()
            result.setAccessibleName(f"Result of {call.name}")
            result.setPlaceholderText(f"Result of {call.name}, for the model to read")
            result.setTabChangesFocus(True)
            result.setFixedHeight(_NUM_RESULT_LINES * result.fontMetrics().lineSpacing() + 18)
            result.textChanged.connect(self._show_button)
            self._bodies.append(body)
            self.results.append(result)
            name = label(f"Calls {call.name}", wraps=True)
            for offset, widget in enumerate((name, body, result)):
                self._column.insertWidget(3 * index + offset, widget)
        self.send.setText("Send result" if len(self._calls) == 1 else "Send results")
        self.setVisible(bool(self._calls))
        self.show_state(is_newest=False, can_send=False)

    def show_state(self, *, is_newest: bool, can_send: bool) -> None:
        """Show the fields for results if the answer is the newest, and enable *Send* if a prompt can be sent now."""
        self._can_send = can_send
        for result in self.results:
            result.setVisible(is_newest)
        self.send.setVisible(is_newest)
        self._show_button()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        for body in self._bodies:
            body.apply_theme(theme)

    def _show_button(self) -> None:
        is_complete = all(result.toPlainText().strip() for result in self.results)
        self.send.setEnabled(self._can_send and is_complete)
        self.send.setToolTip("" if is_complete else "Type the result of each call first")

    def _on_send(self) -> None:
        calls = zip(self._calls, self.results, strict=True)
        self.results_sent.emit(
            [ToolResult(id=call.id, name=call.name, content=result.toPlainText()) for call, result in calls]
        )
