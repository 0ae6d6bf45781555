"""Small window shown while a recording is opened, with its progress or the reason why it cannot be opened.

Owns only its widgets. The caller opens the main window when `opened` is emitted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QCloseEvent
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QPushButton, QVBoxLayout, QWidget

from kvscope_app.playback.file_opening import FileOpening
from kvscope_app.playback.recording_opening import RecordingOpening
from kvscope_app.ui.widget_factories import label
from kvscope_app.ui.zoom import scaled

_STEPS: Final = 1000
_WIDTH: Final = 460


class OpeningWindow(QWidget):
    """Progress window. Closing it cancels the opening; it closes by itself once the recording is open."""

    opened = Signal(object)
    """Emitted with the `Recording` before the window closes."""
    failed = Signal(str)
    """Emitted with the reason in one line if the recording cannot be opened. The window stays open and shows the
    reason.
    """

    def __init__(self, opening: RecordingOpening) -> None:
        super().__init__()
        name = Path(opening.path).name
        self.setObjectName("opening")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setWindowTitle(f"{name} – kvscope")
        self.heading = label(f"Opening {name}", "heading", wraps=True)
        self.reason = label("", "muted", wraps=True)
        self.reason.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.reason.hide()
        self.bar = QProgressBar()
        self.bar.setTextVisible(False)
        self.bar.setRange(0, _STEPS)
        self.bar.setAccessibleName(f"Opening {name}")
        self.button = QPushButton("Cancel")
        self.button.clicked.connect(self.close)
        self._lay_out()
        self._opening = FileOpening(opening, self)
        self._opening.progressed.connect(lambda share: self.bar.setValue(min(round(share * _STEPS), _STEPS - 1)))
        self._opening.opened.connect(self._on_opened)
        self._opening.failed.connect(self._on_failed)

    def closeEvent(self, event: QCloseEvent) -> None:
        self._opening.cancel()
        super().closeEvent(event)

    def _on_opened(self, recording: object) -> None:
        self.opened.emit(recording)
        self.close()

    def _on_failed(self, reason: str) -> None:
        self.heading.setText("The file cannot be opened")
        self.reason.setText(reason)
        self.reason.show()
        self.bar.hide()
        self.button.setText("Close")
        self.failed.emit(reason)

    def _lay_out(self) -> None:
        row = QHBoxLayout()
        row.addStretch()
        row.addWidget(self.button)
        column = QVBoxLayout(self)
        column.setContentsMargins(22, 20, 22, 18)
        column.setSpacing(12)
        column.addWidget(self.heading)
        column.addWidget(self.bar)
        column.addWidget(self.reason)
        column.addStretch()
        column.addLayout(row)
        self.resize(scaled(_WIDTH), self.sizeHint().height())
