"""Model of the newest events of a log, newest first. Owns the rows and the filter."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from PySide6.QtCore import QModelIndex, QObject

from kvscope_app.session.event_log import EventLog, LoggedEvent
from kvscope_app.views.events.event_entries import EventEntries
from kvscope_app.views.table import Index
from kvscope_telemetry.messages.event_kinds import KIND_NAMES

MAX_SHOWN: Final = 2_000


class EventFilter(StrEnum):
    ALL = "All events"
    REQUESTS = "Without evictions"
    PREEMPTIONS = "Preemptions"
    FAILURES = "Refused and aborted"


_KINDS: Final[dict[EventFilter, tuple[str, ...]]] = {
    EventFilter.ALL: KIND_NAMES,
    EventFilter.REQUESTS: tuple(kind for kind in KIND_NAMES if kind not in ("evicted", "note")),
    EventFilter.PREEMPTIONS: ("preempted", "resumed"),
    EventFilter.FAILURES: ("refused", "aborted"),
}


class EventModel(EventEntries):
    """Newest `MAX_SHOWN` events of a log that pass a filter, or the entries passed to `show_entries`."""

    def __init__(self, wall_offset_ns: int, parent: QObject | None = None) -> None:
        super().__init__(wall_offset_ns, parent)
        self._entries: list[LoggedEvent] = []
        self._filter = EventFilter.ALL
        self._serial = 0
        self._num_clears = 0

    def append_new(self, log: EventLog) -> None:
        if log.num_clears != self._num_clears:
            self._num_clears, self._serial = log.num_clears, 0
            self.show_entries([])
        new_entries = [entry for entry in log.since(self._serial, MAX_SHOWN) if self._passes_filter(entry)]
        self._serial = log.last_serial
        self._prepend(new_entries)

    def show_only(self, event_filter: EventFilter, log: EventLog) -> None:
        self._filter = event_filter
        self.show_entries(log.of_kinds(_KINDS[event_filter], MAX_SHOWN))
        self._serial = log.last_serial

    def show_entries(self, entries: Sequence[LoggedEvent]) -> None:
        """Replace the rows by `entries`, which are given oldest first."""
        newest_first = list(reversed(entries))[:MAX_SHOWN]
        if newest_first == self._entries:
            return
        self.beginResetModel()
        self._entries = newest_first
        self.endResetModel()

    def entry_at(self, row: int) -> LoggedEvent | None:
        return self._entries[row] if 0 <= row < len(self._entries) else None

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._entries)

    def _passes_filter(self, entry: LoggedEvent) -> bool:
        return entry.event.kind in _KINDS[self._filter]

    def _prepend(self, new_entries: list[LoggedEvent]) -> None:
        if not new_entries:
            return
        self.beginInsertRows(QModelIndex(), 0, len(new_entries) - 1)
        self._entries[:0] = reversed(new_entries)
        self.endInsertRows()
        if len(self._entries) > MAX_SHOWN:
            self.beginRemoveRows(QModelIndex(), MAX_SHOWN, len(self._entries) - 1)
            del self._entries[MAX_SHOWN:]
            self.endRemoveRows()
