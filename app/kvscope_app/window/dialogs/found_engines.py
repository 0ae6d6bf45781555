"""List of the engines that run on this machine, in the attach dialog. The search runs on its own thread."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import QHBoxLayout, QListWidget, QListWidgetItem, QPushButton, QVBoxLayout, QWidget

from kvscope_app.session.background import Background
from kvscope_app.session.background_watch import BackgroundWatch
from kvscope_app.ui.widget_factories import label
from kvscope_app.ui.zoom import scaled
from kvscope_telemetry.discovery.found_engine import FoundEngine
from kvscope_telemetry.messages.model_names import short_name

_MAX_ROWS_SHOWN: Final = 4
_SEARCHING: Final = "Looking for engines on this machine…"
_NONE_FOUND: Final = "No engine found on this machine."


def find_local_engines() -> Sequence[FoundEngine]:
    from kvscope_telemetry.discovery.local_search import find_engines

    return find_engines()


class FoundEngines(QWidget):
    """Searches when it is shown."""

    chosen = Signal(str)
    """Emitted with the address of the engine that the user selected."""
    opened = Signal(str)
    """Emitted with the address of the engine that the user double-clicked, after `chosen`."""
    changed = Signal()
    """Emitted when a search has ended, because the height of the list may differ."""

    def __init__(self) -> None:
        super().__init__()
        self._search: BackgroundWatch | None = None
        self._message = label(_SEARCHING, "muted", elastic=True)
        self._list = QListWidget()
        self._list.setAccessibleName("Engines on this machine")
        self._list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._list.setTextElideMode(Qt.TextElideMode.ElideMiddle)
        self._list.hide()
        self._again = QPushButton("Search Again")
        self._again.setAutoDefault(False)  # Enter in a field must trigger Attach
        self._again.clicked.connect(self.search)
        self._list.currentItemChanged.connect(self._choose)
        self._list.itemClicked.connect(self._choose)
        self._list.itemDoubleClicked.connect(self._open)
        row = QHBoxLayout()
        row.addWidget(self._message, 1)
        row.addWidget(self._again)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.addLayout(row)
        column.addWidget(self._list)

    def search(self) -> None:
        """Start a search, unless one is in progress."""
        if self._search is None:
            self._message.setText(_SEARCHING)
            self._again.setEnabled(False)
            search = Background(lambda _: find_local_engines(), "kvscope-find-all")
            self._search = BackgroundWatch(search, partial(self._on_end, search), self)

    # Qt overrides

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.search()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        if self._search is not None:
            self._search.stop()
            self._search = None

    # private

    def _on_end(self, search: Background[Sequence[FoundEngine]]) -> None:
        self._search = None
        self._again.setEnabled(True)
        self._show_engines(search.result or ())
        if search.failure:
            self._message.setText(f"The search failed: {search.failure}")
        self.changed.emit()

    def _show_engines(self, engines: Sequence[FoundEngine]) -> None:
        self._list.clear()
        for engine in engines:
            item = QListWidgetItem(_text(engine))
            item.setToolTip("\n".join(filter(None, (engine.address, engine.model, engine.note))))
            item.setData(Qt.ItemDataRole.UserRole, engine.address)
            if not engine.can_attach:
                item.setFlags(Qt.ItemFlag.NoItemFlags)
            self._list.addItem(item)
        self._message.setText("On this machine" if engines else _NONE_FOUND)
        rows = min(len(engines), _MAX_ROWS_SHOWN)
        self._list.setFixedHeight(rows * max(self._list.sizeHintForRow(0), scaled(18)) + 2 * self._list.frameWidth())
        self._list.setVisible(bool(engines))

    def _choose(self, item: QListWidgetItem | None) -> None:
        if item is not None and _can_attach(item):
            self.chosen.emit(_address_of(item))

    def _open(self, item: QListWidgetItem) -> None:
        if _can_attach(item):  # Qt reports clicks on disabled items, too
            self.opened.emit(_address_of(item))


def _can_attach(item: QListWidgetItem) -> bool:
    return bool(item.flags() & Qt.ItemFlag.ItemIsEnabled)


def _address_of(item: QListWidgetItem) -> str:
    return str(item.data(Qt.ItemDataRole.UserRole))


def _text(engine: FoundEngine) -> str:
    """Return the engine's line, with its note instead of the model if it cannot be watched."""
    about = short_name(engine.model) if engine.can_attach else engine.note
    return "  –  ".join(filter(None, (f"{engine.engine} {engine.version}".strip(), about, engine.address)))
