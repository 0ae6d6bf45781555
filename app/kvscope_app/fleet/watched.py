"""Which engines a fleet watches: those of its list, and those a person added beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.fleet.entries import MAX_ENTRIES, FleetEntry


class Watched:
    """Tells `watch` all of them whenever one comes or goes. From any thread: lists are read on one of their own."""

    def __init__(self, watch: Callable[[Sequence[FleetEntry]], None]) -> None:
        self._watch = watch
        self._lock = threading.Lock()
        self._listed: tuple[FleetEntry, ...] = ()
        self._added: tuple[FleetEntry, ...] = ()

    def show_list(self, entries: Sequence[FleetEntry]) -> None:
        """What the list says now."""
        with self._lock:
            self._listed = tuple(entries)
            self._tell()

    def add(self, entry: FleetEntry) -> None:
        """Beside the list. Raises BadInput for one that is there, and where there is room for no more."""
        with self._lock:
            known = {each.address.text for each in (*self._listed, *self._added)}
            if entry.address.text in known:
                raise BadInput(f"{entry.address.text} is on the list already")
            if len(known) >= MAX_ENTRIES:
                raise BadInput(f"{entry.address.text} is not added: a fleet is at most {MAX_ENTRIES} engines")
            self._added += (entry,)
            self._tell()

    def _tell(self) -> None:
        listed = {entry.address.text for entry in self._listed}
        self._watch((*self._listed, *(entry for entry in self._added if entry.address.text not in listed)))
