"""Asks for the endpoint of an engine that runs elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QPushButton, QWidget

from kvscope_app.look.plain_text import PlainLabel
from kvscope_app.window.help_sheets import Sheet
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.sockets.endpoints import endpoints


class AttachSheet(Sheet):
    """Gives a checked endpoint to `attach`."""

    def __init__(self, parent: QWidget, attach: Callable[[str], None]) -> None:
        super().__init__("Attach to an engine", parent)
        self._attach = attach
        words = PlainLabel("Where it listens: ipc:///DIR/telemetry on this machine, or tcp://HOST:PORT.")
        words.setProperty("look", "muted")
        words.setWordWrap(True)
        self._line = QLineEdit()
        self._line.setPlaceholderText("ipc:///run/user/1000/kvscope/telemetry")
        self._line.setAccessibleName("Endpoint")
        self._complaint = PlainLabel()
        self._complaint.setWordWrap(True)
        self._complaint.hide()
        go = QPushButton("Attach")
        go.setProperty("look", "primary")
        go.setDefault(True)
        go.clicked.connect(self._try)
        cancel = QPushButton("Cancel")
        cancel.clicked.connect(self.close)
        row = QHBoxLayout()
        row.addStretch()
        row.addWidget(cancel)
        row.addWidget(go)
        for widget in (words, self._line, self._complaint):
            self.column.addWidget(widget)
        self.column.addLayout(row)
        self.resize(520, 150)

    def _try(self) -> None:
        endpoint = self._line.text().strip()
        try:
            endpoints(endpoint)
            self._attach(endpoint)
        except BadInput as error:
            self._complaint.setText(str(error))
            self._complaint.show()
            return
        self.close()
