"""Watches up to 512 engines with one thread.

kvscope's own engines share a ZeroMQ context and are polled in turn, five times a second, because a thread, a context
and a mirror for each would cost more than the few figures shown. The sources of external engines have threads of their
own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

import zmq

from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.fleet.external_member import ExternalMember
from kvscope_telemetry.fleet.fleet_list import MAX_ENTRIES, FleetEntry
from kvscope_telemetry.fleet.fleet_row import FleetRow
from kvscope_telemetry.fleet.own_member import Context, OwnMember
from kvscope_telemetry.source import SourceState
from kvscope_telemetry.transport.file_limit import raise_file_limit

PASS_S: Final = 0.2
ROWS_S: Final = 0.5
_SOCKETS_EACH: Final = 8


class FleetMember(Protocol):
    """One engine of a fleet. Used by one thread."""

    def poll(self) -> None:
        """Process the pending messages. Never blocks."""

    def row(self) -> FleetRow: ...

    def close(self) -> None: ...


class RefusedMember:
    """An engine to which no connection can be tried, for example because its key cannot be read."""

    def __init__(self, entry: FleetEntry, reason: str) -> None:
        self._row = FleetRow(entry, SourceState.REFUSED, reason)

    def poll(self) -> None: ...

    def row(self) -> FleetRow:
        return self._row

    def close(self) -> None: ...


Open = Callable[[FleetEntry, Context], FleetMember]


def open_member(entry: FleetEntry, context: Context) -> FleetMember:
    """Open a reader for the engine at the entry's address, or a `RefusedMember` if the address is not accepted."""
    try:
        if entry.address.is_external:
            return ExternalMember(entry, entry.address.open())
        return OwnMember(entry, context)
    except BadInput as error:
        return RefusedMember(entry, str(error))


class Fleet:
    """Watches the engines passed to the last `watch`, until `close`."""

    def __init__(self, opener: Open = open_member) -> None:
        self.rows: tuple[FleetRow, ...] = ()
        """Newest figures of each engine, in the order of the list. Readable from any thread."""
        self.failure = ""
        self._opener = opener
        self._wanted: tuple[FleetEntry, ...] = ()
        self._members: dict[FleetEntry, FleetMember] = {}
        self._stopped, self._has_work = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvscope-fleet", daemon=True)
        self._thread.start()

    def watch(self, entries: Sequence[FleetEntry]) -> None:
        """Watch these engines. Those already watched keep their connection. Thread-safe."""
        self._wanted = tuple(dict.fromkeys(entries))[:MAX_ENTRIES]
        self._has_work.set()

    def stop(self) -> None:
        """Request the thread to stop, without waiting; `close` waits."""
        self._stopped.set()
        self._has_work.set()

    def close(self) -> None:
        """Stop the thread and free all sockets. Idempotent."""
        self.stop()
        self._thread.join()

    # Fleet thread

    def _run(self) -> None:
        with suppress(KvscopeError):  # with a lower limit, fewer engines can be watched
            raise_file_limit()
        context: Context = zmq.Context()
        context.set(zmq.MAX_SOCKETS, MAX_ENTRIES * _SOCKETS_EACH)
        try:
            self._read(context)
        except Exception as error:  # shown to the user: otherwise the table would look like idle engines
            self.failure = f"reading failed: {error!r:.200}"
            raise
        finally:
            _close_all(list(self._members.values()))
            context.term()

    def _read(self, context: Context) -> None:
        published_s = 0.0
        while not self._stopped.is_set():
            self._has_work.clear()
            has_changed = self._update_members(self._wanted, context)
            for member in self._members.values():
                member.poll()
            now_s = time.monotonic()
            if has_changed or now_s - published_s >= ROWS_S:
                published_s = now_s
                self.rows = tuple(member.row() for member in self._members.values())
            if not self._stopped.is_set():
                self._has_work.wait(PASS_S)

    def _update_members(self, wanted: tuple[FleetEntry, ...], context: Context) -> bool:
        if wanted == tuple(self._members):
            return False
        _close_all([member for entry, member in self._members.items() if entry not in wanted])
        before, self._members = self._members, {}
        for entry in wanted:
            self._members[entry] = before[entry] if entry in before else self._opener(entry, context)
        return True


def _close_all(members: list[FleetMember]) -> None:
    """Close members concurrently, because a source may have to wait for a server that does not answer."""
    closing_threads = [
        threading.Thread(target=m.close, name="kvscope-fleet-end") for m in members if isinstance(m, ExternalMember)
    ]
    for thread in closing_threads:
        thread.start()
    for member in members:
        if not isinstance(member, ExternalMember):
            member.close()
    for thread in closing_threads:
        thread.join()
