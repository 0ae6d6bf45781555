"""Where a prompt is written: Enter sends, Shift+Enter makes a new line, Up brings back earlier prompts."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QMimeData, QRect, QSize, Qt, Signal
from PySide6.QtGui import QKeyEvent, QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QPlainTextEdit, QPushButton, QSizePolicy, QWidget

from kvscope_app.look.makers import set_look

MAX_LINES = 8


class PromptEdit(QPlainTextEdit):
    """As tall as its text, up to `MAX_LINES`."""

    sent = Signal()
    cancelled = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.setAccessibleName("Prompt")
        self.setPlaceholderText("Ask something")
        self.setTabChangesFocus(True)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self._earlier: list[str] = []
        self._recalled = 0
        self.textChanged.connect(self._fit)
        self._fit()

    def canInsertFromMimeData(self, source: QMimeData) -> bool:
        """Files dropped here are the window's: it opens recordings. Pasting does not ask."""
        return not source.hasUrls() and super().canInsertFromMimeData(source)

    def set_earlier(self, prompts: Sequence[str]) -> None:
        """Prompts that Up brings back, oldest first."""
        self._earlier = list(prompts)
        self._recalled = 0

    def height_of(self, num_lines: int) -> int:
        """Pixels that many lines take."""
        frame = self.contentsMargins()
        margins = 2 * round(self.document().documentMargin()) + frame.top() + frame.bottom()
        return num_lines * self.fontMetrics().lineSpacing() + margins + 2

    def keyPressEvent(self, event: QKeyEvent) -> None:
        key, modifiers = event.key(), event.modifiers()
        if key in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and not modifiers & Qt.KeyboardModifier.ShiftModifier:
            self.sent.emit()
        elif key == Qt.Key.Key_Escape:
            self.cancelled.emit()
        elif not (key in (Qt.Key.Key_Up, Qt.Key.Key_Down) and self._recall(key == Qt.Key.Key_Up)):
            super().keyPressEvent(event)

    def sizeHint(self) -> QSize:
        return QSize(200, self.height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _recall(self, earlier: bool) -> bool:
        """Whether the key changed the text: only on an empty line, or where one was brought back."""
        text = self.toPlainText()
        is_own = text and not (self._recalled and text == self._earlier[-self._recalled])
        if is_own or not self._earlier:
            return False
        step = self._recalled + (1 if earlier else -1)
        if not 0 <= step <= len(self._earlier):
            return True
        self._recalled = step
        self.setPlainText(self._earlier[-step] if step else "")
        self.moveCursor(self.textCursor().MoveOperation.End)
        return True

    def show_hint(self, words: str) -> None:
        """What stands there while there is no text, in as many lines as it takes."""
        if words != self.placeholderText():
            self.setPlaceholderText(words)
            self._fit()

    def _fit(self) -> None:
        num_lines = self._num_hint_lines() if self.document().isEmpty() else int(self.document().size().height())
        height = self.height_of(max(1, min(num_lines, MAX_LINES)))
        if height != self.height():
            self.setFixedHeight(height)

    def _num_hint_lines(self) -> int:
        metrics, margin = self.fontMetrics(), round(self.document().documentMargin())
        room = QRect(0, 0, max(self.viewport().width() - 2 * margin, 1), 1 << 15)
        words = metrics.boundingRect(room, Qt.TextFlag.TextWordWrap, self.placeholderText())
        return -(-words.height() // metrics.lineSpacing())


class Composer(QWidget):
    """The edit, and one button that sends or stops."""

    sent = Signal(str)
    stop_wanted = Signal()
    edit_cancelled = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.edit = PromptEdit()
        self.button = QPushButton("Send")
        self._is_writing = False
        self._can_send = True
        row = QHBoxLayout(self)
        row.setContentsMargins(10, 0, 10, 0)
        row.setSpacing(8)
        row.addWidget(self.edit, 1)
        row.addWidget(self.button, 0, Qt.AlignmentFlag.AlignBottom)
        self.button.setMinimumWidth(self.button.fontMetrics().horizontalAdvance("Stopping…") + 34)
        self.edit.sent.connect(self._send)
        self.edit.cancelled.connect(self.edit_cancelled)
        self.edit.textChanged.connect(self._show_button)
        self.button.clicked.connect(self._on_button)
        self._show_button()

    def show_state(self, *, is_writing: bool, is_stopping: bool, blocked: str) -> None:
        """What the button does now; `blocked` says why nothing can be sent, empty when it can."""
        self._is_writing, self._can_send = is_writing, not blocked
        self.edit.show_hint(blocked or "Ask something")
        self._show_button()
        if blocked and not is_writing:
            self.button.setToolTip(blocked)
        if is_stopping:
            self.button.setText("Stopping…")
            self.button.setEnabled(False)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.button.setFixedHeight(self.edit.height_of(1))

    def set_text(self, text: str) -> None:
        """Put a text there to be changed."""
        self.edit.setPlainText(text)
        self.edit.moveCursor(self.edit.textCursor().MoveOperation.End)
        self.edit.setFocus()

    def _send(self) -> None:
        text = self.edit.toPlainText()
        if text.strip() and self._can_send and not self._is_writing:
            self.edit.clear()
            self.sent.emit(text)

    def _on_button(self) -> None:
        if self._is_writing:
            self.stop_wanted.emit()
        else:
            self._send()

    def _show_button(self) -> None:
        self.button.setText("Stop" if self._is_writing else "Send")
        self.button.setToolTip("Stop this answer" if self._is_writing else "Enter sends")
        set_look(self.button, "danger" if self._is_writing else "primary")
        has_text = bool(self.edit.toPlainText().strip())
        self.button.setEnabled(self._is_writing or (self._can_send and has_text))
