"""Sample prompts, shown in an empty conversation."""

from __future__ import annotations

from PySide6.QtCore import QEvent, Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QApplication, QPushButton, QSizePolicy, QVBoxLayout, QWidget

from kvscope_app.load_generator.sample_prompts import sample_prompts, short_prompts
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.widget_factories import label

NUM_SAMPLE_PROMPTS = 3
_TEXT_MARGINS = 34


class SamplePromptButtons(QWidget):
    """Buttons with sample prompts. A click sends the prompt; Shift and a click insert it into the prompt field for
    editing.
    """

    chosen = Signal(str)
    edit_requested = Signal(str)

    def __init__(self) -> None:
        super().__init__()
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 24, 12, 24)
        column.setSpacing(8)
        column.addStretch(1)
        self._hint = hint = label("Ask the model something and watch the cache answer.", "muted", wraps=True)
        hint.setAlignment(Qt.AlignmentFlag.AlignCenter)
        column.addWidget(hint)
        for prompt in short_prompts(sample_prompts())[:NUM_SAMPLE_PROMPTS]:
            column.addWidget(self._button(prompt))
        column.addStretch(2)

    def set_available(self, can_be_sent: bool) -> None:
        for widget in (self._hint, *self.findChildren(SamplePromptButton)):
            widget.setVisible(can_be_sent)

    def _button(self, prompt: str) -> QPushButton:
        button = SamplePromptButton(prompt)
        button.clicked.connect(lambda: self._choose(prompt))
        return button

    def _choose(self, prompt: str) -> None:
        is_shifted = QApplication.keyboardModifiers() & Qt.KeyboardModifier.ShiftModifier
        (self.edit_requested if is_shifted else self.chosen).emit(prompt)


class SamplePromptButton(QPushButton):
    def __init__(self, prompt: str) -> None:
        super().__init__()
        self._prompt = prompt
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self.setToolTip(plain_tip(f"{prompt}\n\nClick to send, Shift+click to edit first"))
        self.setAccessibleName(prompt)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._elide()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.StyleChange):
            self._elide()

    def _elide(self) -> None:
        width = self.width() - _TEXT_MARGINS
        elided = self.fontMetrics().elidedText(self._prompt, Qt.TextElideMode.ElideRight, width)
        self.setText(elided.replace("&", "&&"))  # a single & marks a mnemonic
