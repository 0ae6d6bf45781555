"""Asks for an engine that runs elsewhere: its endpoint and the key file, or one of those remembered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from PySide6.QtWidgets import QComboBox, QFileDialog, QGridLayout, QHBoxLayout, QLineEdit, QPushButton, QWidget

from kvscope_app.look.plain_text import PlainLabel
from kvscope_app.window.help_sheets import Sheet
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.keys.connections import Connection, key_for, read_connections, remember
from kvscope_telemetry.sockets.endpoints import endpoints, require_curve

_NEW: Final = "Another engine"


class AttachSheet(Sheet):
    """Gives a checked endpoint and key file to `attach`, and remembers them."""

    def __init__(self, parent: QWidget, attach: Callable[[str, Path | None], None]) -> None:
        super().__init__("Attach to an engine", parent)
        self._attach = attach
        self._connections: list[Connection] = []
        words = PlainLabel(
            "Where it listens: ipc:///DIR/telemetry on this machine, or tcp://HOST:PORT. On another machine it wants"
            " a key file, made there with kvscope-engine keys new NAME."
        )
        words.setProperty("look", "muted")
        words.setWordWrap(True)
        self._known = QComboBox()
        self._known.setAccessibleName("Remembered engines")
        self._line = _line("ipc:///run/user/1000/kvscope/telemetry", "Endpoint")
        self._key = _line("none, or a remembered one", "Key file")
        self._complaint = PlainLabel()
        self._complaint.setWordWrap(True)
        self._complaint.hide()
        self.column.addWidget(words)
        self.column.addLayout(self._fields())
        self.column.addWidget(self._complaint)
        self.column.addLayout(self._buttons())
        self._recall()
        self._known.activated.connect(self._choose)
        self.resize(560, 220)

    def _fields(self) -> QGridLayout:
        pick = QPushButton("Choose…")
        pick.setAccessibleName("Choose a key file")
        pick.clicked.connect(self._pick)
        grid = QGridLayout()
        grid.setColumnStretch(1, 1)
        for row, (name, widget) in enumerate((("Engine", self._known), ("Endpoint", self._line), ("Key", self._key))):
            label = PlainLabel(name)
            label.setBuddy(widget)
            grid.addWidget(label, row, 0)
            grid.addWidget(widget, row, 1, 1, 1 if widget is self._key else 2)
        grid.addWidget(pick, 2, 2)
        return grid

    def _buttons(self) -> QHBoxLayout:
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
        return row

    def _recall(self) -> None:
        try:
            self._connections = read_connections()
        except BadInput as error:
            self._complain(str(error))
        self._known.addItem(_NEW)
        for connection in self._connections:
            self._known.addItem(connection.label or connection.endpoint)
        self._known.setEnabled(bool(self._connections))
        self._line.setFocus()

    def _choose(self, row: int) -> None:
        chosen = self._connections[row - 1] if row else Connection("")
        self._line.setText(chosen.endpoint)
        self._key.setText(chosen.key)

    def _pick(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, "Key file", str(Path.home()), "Key files (*.key);;All files (*)")
        if path:
            self._key.setText(path)

    def _try(self) -> None:
        endpoint, text = self._line.text().strip(), self._key.text().strip()
        key = Path(text) if text else None
        try:
            endpoints(endpoint)
            require_curve(endpoint, has_keys=key_for(endpoint, key) is not None)
            self._attach(endpoint, key)
            label = next((known.label for known in self._connections if known.endpoint == endpoint), "")
            remember(Connection(endpoint, text, label))
        except BadInput as error:
            self._complain(str(error))
            return
        self.close()

    def _complain(self, words: str) -> None:
        self._complaint.setText(words)
        self._complaint.show()


def _line(placeholder: str, name: str) -> QLineEdit:
    line = QLineEdit()
    line.setPlaceholderText(placeholder)
    line.setAccessibleName(name)
    return line
