"""Manages the open fleet windows and their data sources, and closes them in order.

Owns the fleets and the readers of their lists. A thread closes them, so that an unresponsive server does not block the
GUI.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from PySide6.QtCore import QObject, QSettings

from kvscope_app.compare.saved_geometry import restore_geometry, save_geometry
from kvscope_app.fleet.fleet_window import FleetWindow
from kvscope_app.setting_names import window_group
from kvscope_app.ui.theming.theme_manager import ThemeManager
from kvscope_app.window.window_slots import WindowSlots
from kvscope_telemetry.addresses import Address
from kvscope_telemetry.credentials.api_keys import read_api_keys
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.fleet.fleet import Fleet
from kvscope_telemetry.fleet.fleet_list import MAX_ENTRIES, FleetEntry
from kvscope_telemetry.fleet.list_reader import ListReader
from kvscope_telemetry.fleet.list_texts import ListText
from kvscope_telemetry.transport.connections import Connection, read_connections

FLEET_WINDOW: Final = "fleet"
"""Window kind of fleet windows in `WindowSlots`."""
Attach = Callable[[Address], object]


class FleetManager(QObject):
    """Opens and closes fleet windows. `attach` opens a window on one engine."""

    def __init__(
        self, themes: ThemeManager, settings: QSettings, slots: WindowSlots, attach: Attach, parent: QObject
    ) -> None:
        super().__init__(parent)
        self._themes, self._settings, self._slots, self._attach = themes, settings, slots, attach
        self.windows: list[FleetWindow] = []
        self._known_window: tuple[FleetWindow, WatchedList] | None = None
        """Window of the attached and saved engines, and its list of engines; None if it is closed."""
        self._closing_threads: list[threading.Thread] = []

    def open_list(self, text: ListText, every_s: float, api_key: str = "") -> FleetWindow:
        """Open a window on the engines listed in `text`, which is reread every `every_s` seconds."""
        fleet = Fleet()
        watched = WatchedList(fleet.watch)
        return self._open(fleet, ListReader(text, every_s, watched.show_list, api_key), watched)

    def open_known(self, attached: tuple[Address, ...]) -> FleetWindow:
        """Show the window of the `attached` and the saved engines, opening it if needed."""
        saved, error_text = _saved_engines()
        names = {entry.address.text: entry.name for entry in saved}
        entries = {address.text: FleetEntry(address, names.get(address.text, "")) for address in attached}
        entries = {entry.address.text: entry for entry in saved} | entries
        if self._known_window is None:
            fleet = Fleet()
            watched = WatchedList(fleet.watch)
            self._known_window = self._open(fleet, None, watched), watched
        window, watched = self._known_window
        watched.show_list(tuple(entries.values()))
        window.saved_engines_error = error_text
        window.show()
        window.raise_()
        window.activateWindow()
        return window

    def close(self) -> None:
        """Close all windows and wait until their fleets and readers are closed. Idempotent."""
        for window in list(self.windows):
            window.close()
        for thread in self._closing_threads:
            thread.join()
        self._closing_threads.clear()

    def _open(self, fleet: Fleet, reader: ListReader | None, watched: WatchedList) -> FleetWindow:
        window = FleetWindow(fleet, self._themes, self._attach, reader, watched.add)
        slot = self._slots.acquire(FLEET_WINDOW)
        group = window_group(FLEET_WINDOW, slot)
        restore_geometry(window, self._settings, group)
        window.closing.connect(partial(save_geometry, settings=self._settings, group=group))
        window.closing.connect(partial(self._on_window_closed, fleet=fleet, reader=reader, slot=slot))
        self.windows.append(window)
        window.show()
        return window

    def _on_window_closed(self, window: FleetWindow, fleet: Fleet, reader: ListReader | None, slot: int) -> None:
        if window not in self.windows:
            return
        self.windows.remove(window)
        if self._known_window is not None and window is self._known_window[0]:
            self._known_window = None
        self._slots.release(FLEET_WINDOW, slot)
        self._closing_threads = [thread for thread in self._closing_threads if thread.is_alive()]
        self._closing_threads.append(threading.Thread(target=_close, args=(fleet, reader), name="kvscope-fleet-end"))
        self._closing_threads[-1].start()
        window.deleteLater()


def _close(fleet: Fleet, reader: ListReader | None) -> None:
    fleet.stop()
    if reader is not None:
        reader.close()
    fleet.close()


def _saved_engines() -> tuple[tuple[FleetEntry, ...], str]:
    """Return the saved engines that can be watched, and an error message on the first one that cannot, or ""."""
    try:
        connections, api_keys = read_connections(), read_api_keys()
    except BadInput as error:
        return (), str(error)
    entries, error_text = [], ""
    for connection in connections:
        address = _address(connection, api_keys.get(connection.endpoint, ""))
        try:
            address.check()
        except BadInput as error:
            error_text = error_text or str(error)
            continue
        entries.append(FleetEntry(address, connection.label))
    return tuple(entries), error_text


def _address(connection: Connection, api_key: str) -> Address:
    address = Address(connection.endpoint)  # the key of one of our engines is looked up by its endpoint
    if not address.is_external:
        return address
    ca = Path(connection.ca) if connection.ca else None
    return Address(connection.endpoint, None, connection.kv_events, api_key, connection.tls, ca)


class WatchedList:
    """Engines that a fleet watches: those of its list, and those that the user added.

    Calls `on_entries` with all engines when the list or the additions change. Thread-safe, because each list is read on
    its own thread.
    """

    def __init__(self, on_entries: Callable[[Sequence[FleetEntry]], None]) -> None:
        self._on_entries = on_entries
        self._lock = threading.Lock()
        self._listed: tuple[FleetEntry, ...] = ()
        self._added: tuple[FleetEntry, ...] = ()

    def show_list(self, entries: Sequence[FleetEntry]) -> None:
        with self._lock:
            self._listed = tuple(entries)
            self._notify()

    def add(self, entry: FleetEntry) -> None:
        """Add an engine. Raises BadInput if the fleet has it already, or if the fleet is full."""
        with self._lock:
            addresses = {each.address.text for each in (*self._listed, *self._added)}
            if entry.address.text in addresses:
                raise BadInput(f"{entry.address.text} is already on the list")
            if len(addresses) >= MAX_ENTRIES:
                raise BadInput(f"{entry.address.text} was not added: a fleet has at most {MAX_ENTRIES} engines")
            self._added += (entry,)
            self._notify()

    def _notify(self) -> None:
        listed = {entry.address.text for entry in self._listed}
        self._on_entries((*self._listed, *(entry for entry in self._added if entry.address.text not in listed)))
