"""Field for the functions that the model may call: a JSON list, typed, pasted or loaded from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QPlainTextEdit, QPushButton, QWidget

from kvscope_app.ui.file_dialogs import ask_open
from kvscope_app.views.console.attachments import read_attachment
from kvscope_app.views.console.tools import EXAMPLE
from kvscope_telemetry.errors import BadInput

_TIP: Final = "Functions that the model may call, as a JSON list in OpenAI's format. Calls are shown with the answer"
_FILTERS: Final = "JSON (*.json);;All files (*)"
_NUM_LINES: Final = 3


class ToolsField(QWidget):
    edited = Signal()
    """Emitted when the user has changed the definitions."""
    failed = Signal(str)
    """Emitted with a sentence for the user if a file could not be read."""

    def __init__(self) -> None:
        super().__init__()
        self.text = QPlainTextEdit()
        self.text.setAccessibleName("Tools")
        self.text.setPlaceholderText(EXAMPLE)
        self.text.setToolTip(_TIP)
        self.text.setTabChangesFocus(True)
        self.text.setFixedHeight(_NUM_LINES * self.text.fontMetrics().lineSpacing() + 18)
        self.load = QPushButton("Load…")
        self.load.setToolTip("Load the definitions from a JSON file")
        self._is_filling = False
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(6)
        row.addWidget(self.text, 1)
        row.addWidget(self.load, 0, Qt.AlignmentFlag.AlignTop)
        self.text.textChanged.connect(self._on_text)
        self.load.clicked.connect(lambda: ask_open(self, "Load tools", "", _FILTERS, self.load_file))

    def fill(self, text: str) -> None:
        if text != self.text.toPlainText():
            self._is_filling = True
            self.text.setPlainText(text)
            self._is_filling = False

    def load_file(self, path: str) -> None:
        try:
            self.text.setPlainText(read_attachment(Path(path)).text)
        except BadInput as error:
            self.failed.emit(str(error).replace("was not attached", "was not loaded"))

    def _on_text(self) -> None:
        if not self._is_filling:
            self.edited.emit()
