"""Asks for an engine that runs elsewhere: its endpoint and the key file, or one of those remembered, which it names
and forgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from PySide6.QtWidgets import (
    QComboBox,
    QFileDialog,
    QGridLayout,
    QHBoxLayout,
    QLineEdit,
    QPushButton,
    QSizePolicy,
    QWidget,
)

from kvscope_app.look.plain_text import PlainLabel
from kvscope_app.window.sheets.help_sheets import Sheet
from kvscope_telemetry.addresses import Address
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.keys.connections import Connection, forget, read_connections, remember, rename

_NEW: Final = "Another engine"


class AttachSheet(Sheet):
    """Gives a checked endpoint and key file to `attach`, and remembers them."""

    def __init__(self, parent: QWidget, attach: Callable[[Address], None]) -> None:
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
        self._known.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self._key = _line("a .key file; empty: your own, or the one remembered", "Key file")
        self._name = _line("what to call it here, if you like", "Name")
        self._forget = _button("Forget", "Take it off the list; the key file stays", self._forget_it)
        self._complaint = PlainLabel()
        self._complaint.setProperty("look", "warning")
        self._complaint.setWordWrap(True)
        self._complaint.hide()
        self.column.addWidget(words)
        self.column.addLayout(self._fields())
        self.column.addWidget(self._complaint)
        self.column.addLayout(self._buttons())
        self._recall()
        self._known.activated.connect(self._choose)
        self._name.editingFinished.connect(self._rename)
        self.resize(600, 260)

    def _fields(self) -> QGridLayout:
        pick = _button("Choose…", "Choose a key file", self._pick)
        fields: tuple[tuple[str, QWidget, QWidget | None], ...] = (
            ("Engine", self._known, self._forget),
            ("Endpoint", self._line, None),
            ("Key", self._key, pick),
            ("Name", self._name, None),
        )
        grid = QGridLayout()
        grid.setColumnStretch(1, 1)
        grid.setVerticalSpacing(8)
        for row, (name, widget, beside) in enumerate(fields):
            label = PlainLabel(name)
            label.setBuddy(widget)
            grid.addWidget(label, row, 0)
            grid.addWidget(widget, row, 1, 1, 2 if beside is None else 1)
            if beside is not None:
                grid.addWidget(beside, row, 2)
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
        self._list()
        self._line.setFocus()

    def _list(self, row: int = 0) -> None:
        """Those remembered, with `row` chosen: 0 is another one."""
        self._known.clear()
        self._known.addItem(_NEW)
        for connection in self._connections:
            named = f"{connection.label}  –  {connection.endpoint}" if connection.label else connection.endpoint
            self._known.addItem(named)
        self._known.setCurrentIndex(row)
        self._known.setEnabled(bool(self._connections))
        self._forget.setEnabled(row > 0)

    def _choose(self, row: int) -> None:
        chosen = self._connections[row - 1] if row else Connection("")
        self._line.setText(chosen.endpoint)
        self._key.setText(chosen.key)
        self._name.setText(chosen.label)
        self._forget.setEnabled(row > 0)

    def _forget_it(self) -> None:
        row = self._known.currentIndex()
        if row < 1:
            return
        try:
            forget(self._connections[row - 1].endpoint)
        except BadInput as error:
            self._complain(str(error))
            return
        del self._connections[row - 1]
        self._list()
        self._choose(0)

    def _rename(self) -> None:
        """A remembered one has its new name at once."""
        row, label = self._known.currentIndex(), self._name.text().strip()
        if row < 1 or self._connections[row - 1].endpoint != self._line.text().strip():
            return
        chosen = self._connections[row - 1]
        if label == chosen.label:
            return
        try:
            rename(chosen.endpoint, label)
        except BadInput as error:
            self._complain(str(error))
            return
        self._connections[row - 1] = replace(chosen, label=label)
        self._list(row)

    def _pick(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, "Key file", str(Path.home()), "Key files (*.key);;All files (*)")
        if path:
            self._key.setText(path)

    def _try(self) -> None:
        endpoint, text = self._line.text().strip(), self._key.text().strip()
        key = Path(text) if text else None
        try:
            address = Address(endpoint, key)
            address.check()
            self._attach(address)
            remember(Connection(endpoint, text, self._name.text().strip() or self._label_of(endpoint)))
        except BadInput as error:
            self._complain(str(error))
            return
        self.close()

    def _label_of(self, endpoint: str) -> str:
        """What a remembered one is called, typed here again."""
        is_chosen = self._known.currentIndex() > 0  # then its name was here to be taken away
        known = [] if is_chosen else self._connections
        return next((connection.label for connection in known if connection.endpoint == endpoint), "")

    def _complain(self, words: str) -> None:
        self._complaint.setText(words)
        self._complaint.show()
        needed = self.column.totalHeightForWidth(self.width())  # or the fields above are squeezed
        self.resize(self.width(), max(self.height(), needed))


def _button(text: str, tip: str, clicked: Callable[[], None]) -> QPushButton:
    button = QPushButton(text)
    button.setToolTip(tip)
    button.setAccessibleName(tip)
    button.setAutoDefault(False)  # Enter in a field attaches
    button.clicked.connect(clicked)
    return button


def _line(placeholder: str, name: str) -> QLineEdit:
    line = QLineEdit()
    line.setPlaceholderText(placeholder)
    line.setAccessibleName(name)
    return line
