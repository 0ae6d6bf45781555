"""Dialog to attach to an engine: one that runs on this machine, a saved connection, or an address with credentials.

Saved connections can also be renamed and deleted.
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
from kvscope_app.window.dialogs.attach_address import OWN_ENGINE, engine_kinds, field_text_of, kind_of
from kvscope_app.window.dialogs.attach_fields import AttachFields
from kvscope_app.window.dialogs.found_engines import FoundEngines
from kvscope_telemetry.addresses import Address
from kvscope_telemetry.collectors.external_engines import find_engine
from kvscope_telemetry.credentials.api_keys import keep_api_key, read_api_keys
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.transport.connections import Connection, read_connections, remember, remove, rename

_NEW_ENGINE_TEXT: Final = "Another engine"
_SIZE: Final = (640, 330)
_HOW_TO_ATTACH: Final = (
    "Its endpoint: ipc:///DIR/telemetry on this machine, tcp://HOST:PORT with a key file made there by "
    "kvscope-engine keys new NAME, or ssh://HOST, which needs no key file. Also accepted: an engine in Prometheus, "
    "prometheus://HOST:9090?job=JOB."
)


class AttachDialog(Sheet):
    """Dialog that passes a checked address to `attach` and saves the connection.

    The API key is saved only if the user asks for it.
    """

    def __init__(
        self,
        parent: QWidget,
        attach: Callable[[Address], object],
        title: str = "Attach to an engine",
        action: str = "Attach",
        address_text: str = "",
    ) -> None:
        """Create the dialog. `address_text` is the initial address; `action` is the text of the button that
        attaches.
        """
        super().__init__(title, parent)
        self._attach, self._action = attach, action
        self._connections: list[Connection] = []
        self._message = PlainLabel()
        self._message.setProperty("look", "muted")
        self._message.setWordWrap(True)
        self.fields = AttachFields()
        self.found_engines = FoundEngines()
        self._error_label = PlainLabel()
        self._error_label.setProperty("look", "warning")
        self._error_label.setWordWrap(True)
        self._error_label.hide()
        self.column.addWidget(self.found_engines)
        self.column.addWidget(self.fields.engine_kinds, 0, Qt.AlignmentFlag.AlignLeft)
        self.column.addWidget(self._message)
        self.column.addLayout(self.fields.grid)
        self.column.addWidget(self._error_label)
        self.column.addStretch(1)
        self.column.addLayout(self._buttons())
        self.resize(*_SIZE)
        self._connect()
        self._show_kind(kind_of(address_text))
        self.fields.address_line.setText(field_text_of(address_text))
        self._load_connections()

    def _connect(self) -> None:
        fields = self.fields
        fields.engine_kinds.chosen.connect(lambda index: self._show_kind(engine_kinds()[index]))
        fields.address_line.textEdited.connect(self._follow_typed)
        fields.saved_engines.activated.connect(self._choose)
        fields.name.editingFinished.connect(self._rename)
        fields.forget_button.clicked.connect(self._forget_selected)
        fields.pick_key.clicked.connect(self._pick_key_file)
        fields.pick_ca.clicked.connect(self._pick_ca_file)
        self.found_engines.chosen.connect(self._choose_found)
        self.found_engines.opened.connect(self._try_to_attach)
        self.found_engines.changed.connect(self._fit_height)

    def _buttons(self) -> QHBoxLayout:
        attach_button = QPushButton(self._action)
        attach_button.setProperty("look", "primary")
        attach_button.setDefault(True)
        attach_button.clicked.connect(self._try_to_attach)
        cancel_button = QPushButton("Cancel")
        cancel_button.clicked.connect(self.close)
        row = QHBoxLayout()
        row.addStretch()
        row.addWidget(cancel_button)
        row.addWidget(attach_button)
        return row

    def _show_kind(self, kind: str) -> None:
        self.fields.show_kind(kind)
        engine = find_engine(kind)
        self._message.setText(_HOW_TO_ATTACH if engine is None else engine.how_to_attach)
        self._error_label.hide()
        self._fit_height()

    def _follow_typed(self, text: str) -> None:
        """Switch to the kind of engine that the typed address implies, once the address is complete."""
        kind = kind_of(text)
        if kind != OWN_ENGINE and kind != self.fields.kind:
            self._show_kind(kind)

    def _load_connections(self) -> None:
        try:
            self._connections = read_connections()
        except BadInput as error:
            self._show_error(str(error))
        self._fill_saved_engines()
        self.fields.address_line.setFocus()

    def _fill_saved_engines(self, row: int = 0) -> None:
        """List the saved connections and select `row`; row 0 is for a new connection."""
        combo_box = self.fields.saved_engines
        combo_box.clear()
        combo_box.addItem(_NEW_ENGINE_TEXT)
        for connection in self._connections:
            text = f"{connection.label}  –  {connection.endpoint}" if connection.label else connection.endpoint
            combo_box.addItem(text)
        combo_box.setCurrentIndex(row)
        combo_box.setEnabled(bool(self._connections))
        self.fields.forget_button.setEnabled(row > 0)

    def _choose(self, row: int) -> None:
        connection = self._connections[row - 1] if row else Connection("")
        if row:
            self._show_kind(kind_of(connection.endpoint))
        api_key = self._saved_api_key(connection.endpoint)
        self.fields.show_connection(connection, field_text_of(connection.endpoint), api_key)
        self.fields.forget_button.setEnabled(row > 0)

    def _choose_found(self, address_text: str) -> None:
        """Show the saved connection to this address, or else the address alone."""
        endpoints = [connection.endpoint for connection in self._connections]
        row = endpoints.index(address_text) + 1 if address_text in endpoints else 0
        self.fields.saved_engines.setCurrentIndex(row)
        self._choose(row)
        if not row:
            self._show_kind(kind_of(address_text))
            self.fields.address_line.setText(field_text_of(address_text))

    def _saved_api_key(self, endpoint: str) -> str:
        try:
            return read_api_keys().get(endpoint, "")
        except BadInput as error:
            self._show_error(str(error))
            return ""

    def _forget_selected(self) -> None:
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
        self._fill_saved_engines()
        self._choose(0)

    def _rename(self) -> None:
        row, label = self.fields.saved_engines.currentIndex(), self.fields.name.text().strip()
        if row < 1 or field_text_of(self._connections[row - 1].endpoint) != self.fields.address_line.text().strip():
            return
        connection = self._connections[row - 1]
        if label == connection.label:
            return
        try:
            rename(connection.endpoint, label)
        except BadInput as error:
            self._show_error(str(error))
            return
        self._connections[row - 1] = replace(connection, label=label)
        self._fill_saved_engines(row)

    def _pick_key_file(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, "Key file", str(Path.home()), "Key files (*.key);;All files (*)")
        if path:
            self.fields.key.setText(path)

    def _pick_ca_file(self) -> None:
        path, _ = QFileDialog.getOpenFileName(
            self, "Certificates", str(Path.home()), "Certificates (*.pem *.crt);;All files (*)"
        )
        if path:
            self.fields.ca.setText(path)
            self.fields.tls.setChecked(True)

    def _try_to_attach(self) -> None:
        typed_address = self.fields.typed_address
        try:
            address = typed_address.address
            address.check()
            self._attach(address)
            remember(typed_address.connection(address, self.fields.name.text().strip() or self._label_of(address.text)))
            if address.is_external:
                keep_api_key(address.text, typed_address.api_key if self.fields.keeps_key.isChecked() else "")
        except BadInput as error:
            self._show_error(str(error))
            return
        self.close()

    def _label_of(self, endpoint: str) -> str:
        """Return the name of the saved connection to `endpoint`. Returns "" if there is none, or if the user
        selected a saved connection and removed its name.
        """
        is_saved_selected = (
            self.fields.saved_engines.currentIndex() > 0
        )  # then an empty name means that the user removed it
        candidates = [] if is_saved_selected else self._connections
        return next((connection.label for connection in candidates if connection.endpoint == endpoint), "")

    def _show_error(self, text: str) -> None:
        self._error_label.setText(text)
        self._error_label.show()
        self._fit_height()

    def _fit_height(self) -> None:
        height = self.column.totalHeightForWidth(self.width())
        self.resize(self.width(), max(self.height(), height))
