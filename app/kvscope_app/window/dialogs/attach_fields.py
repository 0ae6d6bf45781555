"""Input fields of the attach dialog for each kind of engine. Does not interpret addresses."""

from __future__ import annotations

from typing import Final

from PySide6.QtWidgets import QCheckBox, QComboBox, QGridLayout, QLineEdit, QPushButton, QSizePolicy, QWidget

from kvscope_app.ui.plain_text import PlainLabel
from kvscope_app.ui.widgets import SegmentedControl
from kvscope_app.window.dialogs.attach_address import OWN_ENGINE, TypedAddress, engine_kinds
from kvscope_telemetry.collectors.external_engines import engine_name, find_engine
from kvscope_telemetry.transport.connections import Connection

_OWN_ENDPOINT: Final = "ipc:///run/user/1000/kvscope/telemetry"
_OWN_ENGINE_FIELDS: Final = ("key",)
_EXTERNAL_ENGINE_FIELDS: Final = ("api_key", "tls", "kv_events")


class AttachFields:
    def __init__(self) -> None:
        self.engine_kinds = SegmentedControl([engine_name(kind) for kind in engine_kinds()], "Kind of engine")
        self.saved_engines = QComboBox()
        self.saved_engines.setAccessibleName("Remembered engines")
        self.saved_engines.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self.address_line = _line(_OWN_ENDPOINT, "Endpoint")
        self.key = _line("a .key file; empty: your own or the remembered one", "Key file")
        self.api_key = _line("none", "API key")
        self.api_key.setEchoMode(QLineEdit.EchoMode.Password)
        self.keeps_key = QCheckBox("Remember it")
        self.keeps_key.setToolTip("Save it in a private file; otherwise you are asked each time")
        self.tls = QCheckBox("https")
        self.tls.setToolTip("Use https")
        self.ca = _line("certificate authority file; empty: the system's", "Certificates")
        self.kv_events = _line("tcp://HOST:5557; empty: as reported by the server", "KV events")
        self.name = _line("display name (optional)", "Name")
        self.forget_button = _button("Forget", "Remove it from the list (the key file is kept)")
        self.pick_key = _button("Choose…", "Choose a key file")
        self.pick_ca = _button("Choose…", "Choose a file of certificates")
        self.kind = OWN_ENGINE
        self._rows: dict[str, list[QWidget]] = {}
        self.grid = QGridLayout()
        self.grid.setColumnStretch(2, 1)
        self.grid.setVerticalSpacing(8)
        self._lay_out()

    @property
    def typed_address(self) -> TypedAddress:
        """Contents of the fields that apply to the shown kind of engine."""
        is_own_engine = self.kind == OWN_ENGINE
        return TypedAddress(
            kind=self.kind,
            address_text=self.address_line.text().strip(),
            key_file=self.key.text().strip() if is_own_engine else "",
            api_key="" if is_own_engine else self.api_key.text().strip(),
            tls=not is_own_engine and self.tls.isChecked(),
            ca_file="" if is_own_engine or not self.tls.isChecked() else self.ca.text().strip(),
            kv_events=self.kv_events.text().strip() if self._has_events else "",
        )

    @property
    def _has_events(self) -> bool:
        engine = find_engine(self.kind)
        return engine is not None and not engine.publishes_slots

    def show_kind(self, kind: str) -> None:
        self.kind = kind
        self.engine_kinds.set_current(engine_kinds().index(kind))
        is_own_engine = kind == OWN_ENGINE
        engine = find_engine(kind)
        self.address_line.setPlaceholderText(_OWN_ENDPOINT if engine is None else f"HOST:{engine.port}")
        self._label_of("where").setText("Endpoint" if is_own_engine else "Server")
        visibility = dict.fromkeys(_OWN_ENGINE_FIELDS, is_own_engine) | dict.fromkeys(
            _EXTERNAL_ENGINE_FIELDS, not is_own_engine
        )
        visibility["kv_events"] = self._has_events
        for name, is_shown in visibility.items():
            for widget in self._rows[name]:
                widget.setVisible(is_shown)
        self._show_ca()

    def show_connection(self, connection: Connection, address_text: str, api_key: str) -> None:
        self.address_line.setText(address_text)
        self.key.setText(connection.key)
        self.name.setText(connection.label)
        self.kv_events.setText(connection.kv_events)
        self.tls.setChecked(connection.tls)
        self.ca.setText(connection.ca)
        self.api_key.setText(api_key)
        self.keeps_key.setChecked(bool(api_key))

    def _lay_out(self) -> None:
        self._add_field("known", "Engine", self.saved_engines, self.forget_button)
        self._add_field("where", "Endpoint", self.address_line)
        self._add_field("key", "Key", self.key, self.pick_key)
        self._add_field("api_key", "API key", self.api_key, self.keeps_key)
        self._add_field("tls", "TLS", self.ca, self.pick_ca, before=self.tls)
        self._add_field("kv_events", "KV events", self.kv_events)
        self._add_field("name", "Name", self.name)
        self.tls.toggled.connect(self._show_ca)

    def _add_field(
        self, name: str, text: str, widget: QWidget, side_widget: QWidget | None = None, before: QWidget | None = None
    ) -> None:
        row, label = self.grid.rowCount(), PlainLabel(text)
        label.setBuddy(before or widget)
        self.grid.addWidget(label, row, 0)
        if before is not None:
            self.grid.addWidget(before, row, 1)
        first = 1 if before is None else 2
        self.grid.addWidget(widget, row, first, 1, 4 - first if side_widget is None else 3 - first)
        if side_widget is not None:
            self.grid.addWidget(side_widget, row, 3)
        self._rows[name] = [label, widget, *(each for each in (side_widget, before) if each is not None)]

    def _label_of(self, name: str) -> PlainLabel:
        label = self._rows[name][0]
        assert isinstance(label, PlainLabel), "a row begins with its label"
        return label

    def _show_ca(self) -> None:
        for widget in (self.ca, self.pick_ca):
            widget.setEnabled(self.tls.isChecked())


def _button(text: str, tip: str) -> QPushButton:
    button = QPushButton(text)
    button.setToolTip(tip)
    button.setAccessibleName(tip)
    button.setAutoDefault(False)  # Enter in a field must trigger Attach
    return button


def _line(placeholder: str, name: str) -> QLineEdit:
    line = QLineEdit()
    line.setPlaceholderText(placeholder)
    line.setAccessibleName(name)
    return line
