"""Dialog to attach to a running engine: its kind, address and credentials, or a saved connection.

Saved connections can be renamed and deleted here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFileDialog, QHBoxLayout, QPushButton, QWidget

from kvscope_app.ui.plain_text import PlainLabel
from kvscope_app.ui.sheet import Sheet
from kvscope_app.window.dialogs.attach_address import OWN_ENGINE, engine_kinds, kind_of, shown_of
from kvscope_app.window.dialogs.attach_fields import AttachFields
from kvscope_telemetry.addresses import Address
from kvscope_telemetry.collectors.external_engines import find_engine
from kvscope_telemetry.credentials.api_keys import keep_api_key, read_api_keys
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.transport.connections import Connection, read_connections, remember, remove, rename

_NEW: Final = "Another engine"
_SIZE: Final = (640, 330)
_HOW_TO_ATTACH: Final = (
    "Its endpoint: ipc:///DIR/telemetry on this machine, tcp://HOST:PORT with a key file made there by "
    "kvscope-engine keys new NAME, or ssh://HOST, which needs no key file."
)


class AttachDialog(Sheet):
    """Passes a checked address to `attach` and saves the connection.

    The API key is saved only if the user asks for it.
    """

    def __init__(
        self,
        parent: QWidget,
        attach: Callable[[Address], object],
        title: str = "Attach to an engine",
        action: str = "Attach",
        where: str = "",
    ) -> None:
        """Open with `where` as the initial address."""
        super().__init__(title, parent)
        self._attach, self._action = attach, action
        self._connections: list[Connection] = []
        self._message = PlainLabel()
        self._message.setProperty("look", "muted")
        self._message.setWordWrap(True)
        self.fields = AttachFields()
        self._complaint = PlainLabel()
        self._complaint.setProperty("look", "warning")
        self._complaint.setWordWrap(True)
        self._complaint.hide()
        self.column.addWidget(self.fields.engine_kinds, 0, Qt.AlignmentFlag.AlignLeft)
        self.column.addWidget(self._message)
        self.column.addLayout(self.fields.grid)
        self.column.addWidget(self._complaint)
        self.column.addStretch(1)
        self.column.addLayout(self._buttons())
        self.resize(*_SIZE)
        self._connect()
        self._show_kind(kind_of(where))
        self.fields.where.setText(shown_of(where))
        self._recall()

    def _connect(self) -> None:
        fields = self.fields
        fields.engine_kinds.chosen.connect(lambda index: self._show_kind(engine_kinds()[index]))
        fields.where.textEdited.connect(self._follow_typed)
        fields.saved_engines.activated.connect(self._choose)
        fields.name.editingFinished.connect(self._rename)
        fields.forget_button.clicked.connect(self._forget_it)
        fields.pick_key.clicked.connect(self._pick)
        fields.pick_ca.clicked.connect(self._pick_ca)

    def _buttons(self) -> QHBoxLayout:
        go = QPushButton(self._action)
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

    def _show_kind(self, kind: str) -> None:
        self.fields.show_kind(kind)
        engine = find_engine(kind)
        self._message.setText(_HOW_TO_ATTACH if engine is None else engine.how_to_attach)
        self._complaint.hide()
        self._fit_height()

    def _follow_typed(self, text: str) -> None:
        """Switch to the kind of engine that a complete address implies."""
        kind = kind_of(text)
        if kind != OWN_ENGINE and kind != self.fields.kind:
            self._show_kind(kind)

    def _recall(self) -> None:
        try:
            self._connections = read_connections()
        except BadInput as error:
            self._show_error(str(error))
        self._list()
        self.fields.where.setFocus()

    def _list(self, row: int = 0) -> None:
        """List the saved connections and select `row`; row 0 is a new one."""
        known = self.fields.saved_engines
        known.clear()
        known.addItem(_NEW)
        for connection in self._connections:
            named = f"{connection.label}  –  {connection.endpoint}" if connection.label else connection.endpoint
            known.addItem(named)
        known.setCurrentIndex(row)
        known.setEnabled(bool(self._connections))
        self.fields.forget_button.setEnabled(row > 0)

    def _choose(self, row: int) -> None:
        chosen = self._connections[row - 1] if row else Connection("")
        if row:
            self._show_kind(kind_of(chosen.endpoint))
        kept = self._kept_key(chosen.endpoint)
        self.fields.show_connection(chosen, shown_of(chosen.endpoint), kept)
        self.fields.forget_button.setEnabled(row > 0)

    def _kept_key(self, endpoint: str) -> str:
        try:
            return read_api_keys().get(endpoint, "")
        except BadInput as error:
            self._show_error(str(error))
            return ""

    def _forget_it(self) -> None:
        row = self.fields.saved_engines.currentIndex()
        if row < 1:
            return
        try:
            remove(self._connections[row - 1].endpoint)
            keep_api_key(self._connections[row - 1].endpoint, "")
        except BadInput as error:
            self._show_error(str(error))
            return
        del self._connections[row - 1]
        self._list()
        self._choose(0)

    def _rename(self) -> None:
        """Save the new name of the selected connection immediately."""
        row, label = self.fields.saved_engines.currentIndex(), self.fields.name.text().strip()
        if row < 1 or shown_of(self._connections[row - 1].endpoint) != self.fields.where.text().strip():
            return
        chosen = self._connections[row - 1]
        if label == chosen.label:
            return
        try:
            rename(chosen.endpoint, label)
        except BadInput as error:
            self._show_error(str(error))
            return
        self._connections[row - 1] = replace(chosen, label=label)
        self._list(row)

    def _pick(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, "Key file", str(Path.home()), "Key files (*.key);;All files (*)")
        if path:
            self.fields.key.setText(path)

    def _pick_ca(self) -> None:
        path, _ = QFileDialog.getOpenFileName(
            self, "Certificates", str(Path.home()), "Certificates (*.pem *.crt);;All files (*)"
        )
        if path:
            self.fields.ca.setText(path)
            self.fields.tls.setChecked(True)

    def _try(self) -> None:
        typed = self.fields.typed
        try:
            address = typed.address
            address.check()
            self._attach(address)
            remember(typed.connection(address, self.fields.name.text().strip() or self._label_of(address.text)))
            if address.is_external:
                keep_api_key(address.text, typed.api_key if self.fields.keeps_key.isChecked() else "")
        except BadInput as error:
            self._show_error(str(error))
            return
        self.close()

    def _label_of(self, endpoint: str) -> str:
        """Return the saved name of an address that was typed rather than selected."""
        is_chosen = self.fields.saved_engines.currentIndex() > 0  # then an empty name means that the user removed it
        known = [] if is_chosen else self._connections
        return next((connection.label for connection in known if connection.endpoint == endpoint), "")

    def _show_error(self, text: str) -> None:
        self._complaint.setText(text)
        self._complaint.show()
        self._fit_height()

    def _fit_height(self) -> None:
        """Enlarge the dialog to fit its contents, so that fields are not squeezed."""
        needed = self.column.totalHeightForWidth(self.width())
        self.resize(self.width(), max(self.height(), needed))
