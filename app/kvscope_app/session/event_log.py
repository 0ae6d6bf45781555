"""Bounded log of the newest events, with indexed queries by time, kind and request. Imports no Qt.

Events are in a ring buffer. Numpy columns with the same slots contain the fields that queries filter by, so that a
query takes microseconds. Each event has its epoch, because request numbers start again with each engine start.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvscope_telemetry.messages.event_kinds import KIND_CODES
from kvscope_telemetry.messages.telemetry import Event

_CLEARS: Final = itertools.count(1)
"""Source of values for `EventLog.num_clears`. They are unique across all logs, so that a reader with a stored value
notices when it reads another log or when the log was cleared.
"""


class LoggedEvent(msgspec.Struct, frozen=True, gc=False):
    """Event with its serial number, its epoch, and its time on this machine's monotonic clock (`time_ns`).

    `serial` counts from 1 and restarts when the log is cleared.

    `gc=False`: no field can be part of a reference cycle, and garbage collection, which blocks the GUI thread, need not
    traverse the events.
    """

    serial: int
    time_ns: int
    epoch: int
    event: Event


class EventLog:
    BYTES_PER_EVENT = 960
    """Upper estimate of an event's size in bytes, with a cause of 100 characters and its data."""

    def __init__(self, max_events: int) -> None:
        self.last_serial = 0
        self.num_clears = 0
        """Id of the log's contents, unique across all logs. It changes when the log is cleared."""
        self.max_events = self._max_events = max_events
        self._events: list[LoggedEvent] = []
        """Ring buffer: the event with number `serial` is at index `(serial - 1) % max_events`. Shorter until the ring
        is full.
        """
        self._time_ns = np.zeros(max_events, np.int64)
        self._kind = np.zeros(max_events, np.uint8)
        self._epoch = np.zeros(max_events, np.int64)
        self._numbers = np.zeros((2, max_events), np.int64)
        """Request numbers, shape (2, max_events): the affected request, and the request that caused the event."""

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[LoggedEvent]:
        return iter(self.since(0))

    def clear(self) -> None:
        """Remove all events and restart the serials at 1."""
        self.last_serial = 0
        self.num_clears = next(_CLEARS)
        self._events.clear()

    def replace_oldest(self, past: Sequence[tuple[int, int, Event]], num_replaced: int) -> None:
        """Replace the first `num_replaced` events by `past`, a sequence of (time in ns, epoch, event), oldest first.

        The serials of all events change.
        """
        retained = [(entry.time_ns, entry.epoch, entry.event) for entry in self.since(num_replaced)]
        if not past and not num_replaced:
            return
        self.clear()
        for time_ns, epoch, event in (*past, *retained)[-self._max_events :]:
            self.last_serial += 1
            self._events.append(LoggedEvent(self.last_serial, time_ns, epoch, event))
        numbers = np.arange(len(self._events))
        self._time_ns[numbers] = [entry.time_ns for entry in self._events]
        self._kind[numbers] = [KIND_CODES[entry.event.kind] for entry in self._events]
        self._epoch[numbers] = [entry.epoch for entry in self._events]
        self._numbers[0, numbers] = [entry.event.number for entry in self._events]
        self._numbers[1, numbers] = [entry.event.other for entry in self._events]

    def extend(self, events: Iterable[Event], epoch: int, offset_ns: int) -> None:
        """Append events. `offset_ns` is added to their times to get this machine's monotonic clock."""
        for event in (new := list(events)):
            self.last_serial += 1
            entry = LoggedEvent(self.last_serial, event.time_ns + offset_ns, epoch, event)
            if len(self._events) < self._max_events:
                self._events.append(entry)
            else:
                self._events[(self.last_serial - 1) % self._max_events] = entry
        if new:
            self._write_columns(new[-self._max_events :], epoch, offset_ns)

    def since(self, serial: int, limit: int | None = None) -> list[LoggedEvent]:
        """Return the newest `limit` of the events after `serial`, oldest first. Takes O(number returned)."""
        count = min(self.last_serial - serial, len(self._events))
        count = count if limit is None else min(count, limit)
        if count <= 0:
            return []
        start = (self.last_serial - count) % self._max_events
        end = start + count
        return self._events[start:end] + self._events[: max(0, end - self._max_events)]

    def between(self, first_ns: int, last_ns: int, kind: str | None = None, limit: int = 1000) -> list[LoggedEvent]:
        """Return the newest `limit` events with `first_ns <= time_ns <= last_ns`, oldest first.

        `kind` None includes all kinds.
        """
        times = self._time_ns[: len(self)]
        is_match = (times >= first_ns) & (times <= last_ns)
        if kind is not None:
            is_match &= self._kind[: len(self)] == KIND_CODES[kind]
        return self._newest(is_match, limit)

    def of_kinds(self, kinds: Collection[str], limit: int) -> list[LoggedEvent]:
        """Return the newest `limit` events of the given kinds, oldest first."""
        codes = np.array(sorted(KIND_CODES[kind] for kind in kinds), np.uint8)
        return self._newest(np.isin(self._kind[: len(self)], codes), limit)

    def of_request(self, epoch: int, number: int, limit: int = 1000) -> list[LoggedEvent]:
        """Return the newest `limit` events that affected or were caused by the request, oldest first."""
        is_match = (self._numbers[:, : len(self)] == number).any(axis=0)
        return self._newest(is_match & (self._epoch[: len(self)] == epoch), limit)

    def _newest(self, is_match: npt.NDArray[np.bool_], limit: int) -> list[LoggedEvent]:
        slots = np.flatnonzero(is_match)
        oldest = self.last_serial % self._max_events if len(self) == self._max_events else 0
        ordered = np.concatenate((slots[slots >= oldest], slots[slots < oldest]))[-limit:]
        return [self._events[slot] for slot in ordered.tolist()]

    def _write_columns(self, events: list[Event], epoch: int, offset_ns: int) -> None:
        slots = np.arange(self.last_serial - len(events), self.last_serial) % self._max_events
        self._time_ns[slots] = [event.time_ns + offset_ns for event in events]
        self._kind[slots] = [KIND_CODES[event.kind] for event in events]
        self._epoch[slots] = epoch
        self._numbers[0, slots] = [event.number for event in events]
        self._numbers[1, slots] = [event.other for event in events]
