"""Reads a list of addresses repeatedly, and keeps the last valid version if reading fails. Owns the reading thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.fleet.fleet_list import FleetEntry, parse_list
from kvscope_telemetry.fleet.list_texts import ListText


@dataclass(frozen=True, slots=True)
class ListReading:
    """Entries of an address list, and the result of the last attempt to read it."""

    entries: tuple[FleetEntry, ...] = ()
    trouble: str = ""
    """Errors in the list, or of the last attempt, as one line of text; empty if there were none."""
    is_old: bool = False
    """Whether the last attempt to read the list failed, so that the entries are from an earlier attempt."""
    read_ns: int = 0
    """When the list was last read, on this machine's monotonic clock; 0 if never."""
    num_tries: int = 0


class ListReader:
    """Reads `text` immediately and then every `every_s` seconds on its own thread.

    `changed` is called on that thread with the entries whenever they differ from the previous ones.
    """

    def __init__(
        self,
        text: ListText,
        every_s: float,
        changed: Callable[[tuple[FleetEntry, ...]], None],
        api_key: str = "",
    ) -> None:
        self.listed = ListReading()
        self._text, self._every_s, self._changed, self._api_key = text, every_s, changed, api_key
        self._stopped, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvscope-fleet-list", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._text.name

    def read_now(self) -> None:
        """Read the list soon, without waiting for the interval."""
        self._wake.set()

    def stop(self) -> None:
        self._stopped.set()
        self._wake.set()

    def close(self) -> None:
        """Stop the thread, and the command if it is running. Idempotent."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.clear()
            self._read()
            if not self._stopped.is_set():
                self._wake.wait(self._every_s)

    def _read(self) -> None:
        previous = self.listed
        try:
            parsed = parse_list(self._text.read(self._stopped), self._api_key)
        except BadInput as error:
            is_old = previous.read_ns > 0
            self.listed = ListReading(previous.entries, str(error), is_old, previous.read_ns, previous.num_tries + 1)
            return
        trouble = "; ".join(filter(None, (self._text.trouble, parsed.trouble)))
        self.listed = ListReading(parsed.entries, trouble, False, time.monotonic_ns(), previous.num_tries + 1)
        if parsed.entries != previous.entries and not self._stopped.is_set():
            self._changed(parsed.entries)
