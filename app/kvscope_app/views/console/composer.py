"""Prompt field: Enter sends, Shift+Enter inserts a new line, Up recalls earlier prompts."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QEvent, QMimeData, QRect, QSize, Qt, Signal
from PySide6.QtGui import QKeyEvent, QKeySequence, QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QPlainTextEdit, QPushButton, QSizePolicy, QWidget

from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import set_icon, set_look, tool_button
from kvscope_app.views.console.answer_count import AnswerCountButton

MAX_LINES = 8
_RECORDING_SUFFIXES = (".mcap", ".mcap.part")


class PromptEdit(QPlainTextEdit):
    """Prompt field that is as high as its text, up to `MAX_LINES`."""

    sent = Signal()
    files_inserted = Signal(list)
    """Emitted with the paths of files that were dropped on the field or pasted into it."""

    def __init__(self) -> None:
        super().__init__()
        self.setAccessibleName("Prompt")
        self.setPlaceholderText("Ask something")
        self.setTabChangesFocus(True)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self._earlier: list[str] = []
        self._recalled = 0
        self.textChanged.connect(self._adjust_height)
        self._adjust_height()

    def canInsertFromMimeData(self, source: QMimeData) -> bool:
        """Accept text and files, but no recordings, which the window opens."""
        return bool(_local_paths(source)) if source.hasUrls() else super().canInsertFromMimeData(source)

    def insertFromMimeData(self, source: QMimeData) -> None:
        paths = _local_paths(source)
        if paths:
            self.files_inserted.emit(paths)
        else:
            super().insertFromMimeData(source)

    def set_earlier(self, prompts: Sequence[str]) -> None:
        """Set the prompts that Up recalls, oldest first."""
        self._earlier = list(prompts)
        self._recalled = 0

    def height_of(self, num_lines: int) -> int:
        frame = self.contentsMargins()
        margins = 2 * round(self.document().documentMargin()) + frame.top() + frame.bottom()
        return num_lines * self.fontMetrics().lineSpacing() + margins + 2

    def event(self, event: QEvent) -> bool:
        """Ignore Undo and Redo if there is nothing to undo or redo in the text, so that the window handles them."""
        if event.type() == QEvent.Type.ShortcutOverride and isinstance(event, QKeyEvent):
            undo, redo = QKeySequence.StandardKey.Undo, QKeySequence.StandardKey.Redo
            document = self.document()
            can_handle = document.isUndoAvailable() if event.matches(undo) else document.isRedoAvailable()
            if (event.matches(undo) or event.matches(redo)) and not can_handle:
                event.ignore()
                return True
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        key, modifiers = event.key(), event.modifiers()
        if key in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and not modifiers & Qt.KeyboardModifier.ShiftModifier:
            self.sent.emit()
        elif key == Qt.Key.Key_Escape:
            event.ignore()  # the page decides what Esc stops or cancels
        elif not (key in (Qt.Key.Key_Up, Qt.Key.Key_Down) and self._recall(key == Qt.Key.Key_Up)):
            super().keyPressEvent(event)

    def sizeHint(self) -> QSize:
        return QSize(200, self.height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._adjust_height()

    def _recall(self, earlier: bool) -> bool:
        """Replace an empty or recalled text by an earlier prompt, or by a later prompt if not `earlier`.

        Returns whether the key was handled, which is not the case if the user has typed a text.
        """
        text = self.toPlainText()
        is_new_text = text and not (self._recalled and text == self._earlier[-self._recalled])
        if is_new_text or not self._earlier:
            return False
        step = self._recalled + (1 if earlier else -1)
        if not 0 <= step <= len(self._earlier):
            return True
        self._recalled = step
        self.setPlainText(self._earlier[-step] if step else "")
        self.moveCursor(self.textCursor().MoveOperation.End)
        return True

    def show_hint(self, text: str) -> None:
        if text != self.placeholderText():
            self.setPlaceholderText(text)
            self._adjust_height()

    def _adjust_height(self) -> None:
        num_lines = self._num_hint_lines() if self.document().isEmpty() else int(self.document().size().height())
        policy = (
            Qt.ScrollBarPolicy.ScrollBarAsNeeded if num_lines > MAX_LINES else Qt.ScrollBarPolicy.ScrollBarAlwaysOff
        )
        self.setVerticalScrollBarPolicy(policy)  # an unneeded scroll bar would take width and wrap one more line
        height = self.height_of(max(1, min(num_lines, MAX_LINES)))
        if height != self.height():
            self.setFixedHeight(height)

    def _num_hint_lines(self) -> int:
        metrics, margin = self.fontMetrics(), round(self.document().documentMargin())
        bounds = QRect(0, 0, max(self.viewport().width() - 2 * margin, 1), 1 << 15)
        text_rect = metrics.boundingRect(bounds, Qt.TextFlag.TextWordWrap, self.placeholderText())
        return -(-text_rect.height() // metrics.lineSpacing())


def _local_paths(data: QMimeData) -> list[str]:
    """Return the paths of files that can be attached: none if any is a recording or not on this machine."""
    urls = data.urls()
    if any(not url.isLocalFile() or url.fileName().endswith(_RECORDING_SUFFIXES) for url in urls):
        return []
    return [url.toLocalFile() for url in urls]


class Composer(QWidget):
    """Prompt field with a Send button after it and, while an answer is being written, a Stop button before it."""

    sent = Signal(str)
    refused = Signal()
    """Emitted when the user presses Enter while no prompt can be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.edit = PromptEdit()
        self.stop = QPushButton("Stop")
        self.button = QPushButton("Send")
        self.attach = tool_button("Attach", "Attach text files, which are sent before the prompt")
        self.answer_count = AnswerCountButton()
        self._is_writing = False
        self._blocked = ""
        row = QHBoxLayout(self)
        row.setContentsMargins(10, 0, 10, 0)
        row.setSpacing(8)
        row.addWidget(self.stop, 0, Qt.AlignmentFlag.AlignBottom)
        row.addWidget(self.attach, 0, Qt.AlignmentFlag.AlignBottom)
        row.addWidget(self.edit, 1)
        row.addWidget(self.answer_count, 0, Qt.AlignmentFlag.AlignBottom)
        row.addWidget(self.button, 0, Qt.AlignmentFlag.AlignBottom)
        set_look(self.stop, "danger")
        set_look(self.button, "primary")
        self.stop.setToolTip("Stop the answer (Esc)")
        self.stop.hide()
        self.edit.sent.connect(self._send)
        self.edit.textChanged.connect(self._show_button)
        self.button.clicked.connect(self._send)
        self._show_button()

    def show_state(self, *, is_writing: bool, is_stopping: bool, blocked: str) -> None:
        """Update the buttons and the hint. `blocked` is the reason why no prompt can be sent, "" if one can."""
        self._is_writing, self._blocked = is_writing, blocked
        self.edit.show_hint(blocked or "Ask something")
        self.stop.setVisible(is_writing)
        self.stop.setEnabled(not is_stopping)
        self._show_button()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        for button in (self.stop, self.attach, self.answer_count, self.button):
            button.setFixedHeight(self.edit.height_of(1))

    def apply_theme(self, theme: Theme) -> None:
        set_icon(self.attach, "plus", theme)

    def set_text(self, text: str) -> None:
        self.edit.setPlainText(text)
        self.edit.moveCursor(self.edit.textCursor().MoveOperation.End)
        self.edit.setFocus()

    def _send(self) -> None:
        text = self.edit.toPlainText()
        if self._blocked or self._is_writing:
            self.refused.emit()
        elif text.strip():
            self.sent.emit(text)
            self.edit.setFocus()  # a click on Send disables it, and the focus would move to another button

    def _show_button(self) -> None:
        has_text = bool(self.edit.toPlainText().strip())
        hint = "An answer is being written" if self._is_writing else "Enter sends"
        self.button.setToolTip(self._blocked or hint)
        self.button.setEnabled(has_text and not self._is_writing and not self._blocked)
