"""Dialog that lists an engine's LoRA adapters, and loads and unloads them while the engine serves.

The dialog is not modal, so the views behind it keep updating.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from PySide6.QtWidgets import QGridLayout, QHBoxLayout, QLineEdit, QPushButton, QWidget
from shiboken6 import isValid

from kvscope_app.debugger import permission
from kvscope_app.debugger.debugger import Debugger
from kvscope_app.ui.file_dialogs import ask_folder
from kvscope_app.ui.sheet import Sheet
from kvscope_app.ui.widget_factories import label, set_look
from kvscope_app.ui.widgets import ElidedLabel
from kvscope_telemetry.messages.commands import (
    MAX_ADAPTER_CHARACTERS,
    MAX_PATH_CHARACTERS,
    LoadAdapter,
    LoadedAdapter,
    UnloadAdapter,
)

_EXPLANATION = (
    "The engine reads the folder, in PEFT's format, on its own machine. Unloading an adapter does not affect requests"
    " that are running."
)


class AdaptersDialog(Sheet):
    def __init__(self, parent: QWidget, debugger: Debugger) -> None:
        super().__init__("LoRA adapters", parent)
        self._debugger, self._session = debugger, debugger.session
        self._shown: tuple[tuple[LoadedAdapter, ...], str] | None = None
        self._rows: list[QWidget] = []
        self._grid = QGridLayout()
        self._grid.setColumnStretch(1, 1)
        self._grid.setHorizontalSpacing(12)
        self._grid.setVerticalSpacing(8)
        self.path, self.name = QLineEdit(), QLineEdit()
        self.browse, self.load = QPushButton("Browse…"), QPushButton("Load")
        self.answer = label("", "muted", wraps=True)
        self._set_up_fields()
        self.column.addWidget(label(_EXPLANATION, "muted", wraps=True))
        self.column.addLayout(self._grid)
        self.column.addLayout(self._new_adapter_row())
        self.column.addWidget(self.answer)
        self.column.addStretch(1)
        self.add_close()
        self.load.setDefault(True)  # Enter in a field loads the adapter
        self._session.status_changed.connect(self._show)
        self._session.request_status()
        self._show()
        self.resize_comfortably(560, 260)

    @property
    def unload_buttons(self) -> list[QPushButton]:
        return [row for row in self._rows if isinstance(row, QPushButton)]

    def load_now(self) -> None:
        """Send the command to load the adapter in the fields. An empty name means the folder's name."""
        path = self.path.text().strip()
        name = self.name.text().strip() or Path(path).name
        if path and name:
            self._send(LoadAdapter, name=name, path=path)

    def _send(self, kind: type[LoadAdapter | UnloadAdapter], **fields: str) -> None:
        self._debugger.send_command(kind, on_answer=self._on_answer, **fields)

    def _on_answer(self, text: str, was_done: bool) -> None:
        self._session.request_status()
        if not isValid(self):  # the dialog was closed before the answer arrived
            return
        self.answer.setText(text)
        set_look(self.answer, "accent" if was_done else "warning")
        if was_done:
            self.path.clear()
            self.name.clear()

    def _show(self) -> None:
        loaded, reason = self._session.status.adapters or (), permission.why_not_load(self._session)
        if self._shown == (loaded, reason):
            return
        self._shown = loaded, reason
        for row in self._rows:
            row.hide()
            row.deleteLater()
        self._rows = []
        for row_index, adapter in enumerate(loaded):
            self._add_row(row_index, adapter, reason)
        if not loaded:
            self._rows.append(label("No adapter is loaded.", "muted"))
            self._grid.addWidget(self._rows[0], 0, 0, 1, 3)
        for field in (self.path, self.name, self.browse):
            field.setEnabled(not reason)
        self._enable_load()

    def _add_row(self, row_index: int, adapter: LoadedAdapter, reason: str) -> None:
        path, unload = ElidedLabel(), QPushButton("Unload")
        path.setProperty("look", "muted")
        path.setText(adapter.path)
        unload.setAccessibleName(f"Unload {adapter.name}")
        unload.clicked.connect(partial(self._send, UnloadAdapter, name=adapter.name))
        unload.setAutoDefault(False)
        unload.setEnabled(not reason)
        unload.setToolTip(reason)
        row = (label(adapter.name), path, unload)
        for column, widget in enumerate(row):
            self._grid.addWidget(widget, row_index, column)
        self._rows += row

    def _enable_load(self) -> None:
        reason = permission.why_not_load(self._session)
        self.load.setEnabled(not reason and bool(self.path.text().strip()))
        self.load.setToolTip(reason)
        if reason:
            self.answer.setText(reason)
        self.name.setPlaceholderText(Path(self.path.text().strip()).name or "Name")

    def _set_up_fields(self) -> None:
        self.path.setPlaceholderText("Folder with adapter_config.json")
        self.path.setAccessibleName("Folder of the adapter")
        self.path.setMaxLength(MAX_PATH_CHARACTERS)
        self.name.setAccessibleName("Name of the adapter")
        self.name.setMaxLength(MAX_ADAPTER_CHARACTERS)
        self.name.setToolTip("Name that requests use; empty: the folder's name")
        self.load.setProperty("look", "primary")
        self.path.textChanged.connect(self._enable_load)
        self.load.clicked.connect(self.load_now)
        self.browse.clicked.connect(lambda: ask_folder(self, "Folder of the adapter", self.path.setText))
        self.browse.setAutoDefault(False)

    def _new_adapter_row(self) -> QHBoxLayout:
        row = QHBoxLayout()
        row.addWidget(self.path, 3)
        row.addWidget(self.browse)
        row.addWidget(self.name, 1)
        row.addWidget(self.load)
        return row
