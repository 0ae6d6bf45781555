"""What an empty conversation shows: a few prompts to begin with."""

from __future__ import annotations

from PySide6.QtCore import QEvent, Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QApplication, QPushButton, QSizePolicy, QVBoxLayout, QWidget

from kvscope_app.load.sample_prompts import sample_prompts, short_prompts
from kvscope_app.look.makers import label
from kvscope_app.look.plain_text import plain_tip

NUM_STARTERS = 3
_TEXT_MARGINS = 34


class Starters(QWidget):
    """Buttons that send a prompt; with Shift they put it into the composer, to be edited first."""

    chosen = Signal(str)
    """To be sent."""
    edit_wanted = Signal(str)

    def __init__(self) -> None:
        super().__init__()
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 24, 12, 24)
        column.setSpacing(8)
        column.addStretch(1)
        self._hint = hint = label("Ask the model something and watch the cache answer.", "muted", wraps=True)
        hint.setAlignment(Qt.AlignmentFlag.AlignCenter)
        column.addWidget(hint)
        for prompt in short_prompts(sample_prompts())[:NUM_STARTERS]:
            column.addWidget(self._button(prompt))
        column.addStretch(2)

    def offer(self, can_be_sent: bool) -> None:
        """Where nobody takes prompts, none is proposed."""
        for part in (self._hint, *self.findChildren(StarterButton)):
            part.setVisible(can_be_sent)

    def _button(self, prompt: str) -> QPushButton:
        button = StarterButton(prompt)
        button.clicked.connect(lambda: self._choose(prompt))
        return button

    def _choose(self, prompt: str) -> None:
        is_shifted = QApplication.keyboardModifiers() & Qt.KeyboardModifier.ShiftModifier
        (self.edit_wanted if is_shifted else self.chosen).emit(prompt)


class StarterButton(QPushButton):
    """A prompt on one line, ended by "…" where there is no room."""

    def __init__(self, prompt: str) -> None:
        super().__init__()
        self._prompt = prompt
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self.setToolTip(plain_tip(f"{prompt}\n\nClick to send, Shift+click to edit first"))
        self.setAccessibleName(prompt)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.StyleChange):
            self._fit()

    def _fit(self) -> None:
        room = self.width() - _TEXT_MARGINS
        elided = self.fontMetrics().elidedText(self._prompt, Qt.TextElideMode.ElideRight, room)
        self.setText(elided.replace("&", "&&"))  # a single one marks a key
