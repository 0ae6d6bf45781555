"""The newest events and when they came, bounded. Knows no Qt.

Request numbers start again with each engine, so an entry carries the epoch it belongs to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvscope_telemetry.messages import Event


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """One event. `time_ns` is this machine's monotonic clock; `serial` counts from 1 and never repeats."""

    serial: int
    time_ns: int
    epoch: int
    event: Event


class EventLog:
    """A ring of `max_events` events, oldest first."""

    BYTES_PER_EVENT = 640
    """Upper estimate of an entry with a cause of 100 characters."""

    def __init__(self, max_events: int) -> None:
        self._events: deque[LoggedEvent] = deque(maxlen=max_events)
        self.last_serial = 0

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[LoggedEvent]:
        return iter(self._events)

    def extend(self, events: Iterable[Event], epoch: int, offset_ns: int) -> None:
        """Append events whose clock is `offset_ns` behind this machine's."""
        for event in events:
            self.last_serial += 1
            self._events.append(LoggedEvent(self.last_serial, event.time_ns + offset_ns, epoch, event))

    def since(self, serial: int) -> list[LoggedEvent]:
        """Events after `serial`, oldest first. Costs as much as there are."""
        count = min(self.last_serial - serial, len(self._events))
        if count <= 0:
            return []
        newest = [entry for entry, _ in zip(reversed(self._events), range(count), strict=False)]
        newest.reverse()
        return newest

    def between(self, first_ns: int, last_ns: int) -> list[LoggedEvent]:
        """Events with `first_ns <= time_ns <= last_ns`, oldest first."""
        found = []
        for entry in reversed(self._events):
            if entry.time_ns < first_ns:
                break
            if entry.time_ns <= last_ns:
                found.append(entry)
        found.reverse()
        return found

    def of_request(self, epoch: int, number: int) -> list[LoggedEvent]:
        """Events that happened to a request, or that it caused, oldest first."""
        return [
            entry
            for entry in self._events
            if entry.epoch == epoch and number in (entry.event.number, entry.event.other)
        ]
