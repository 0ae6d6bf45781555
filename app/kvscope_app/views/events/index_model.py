"""Events of a course as a table, newest first: nothing is kept a row but its serial. Owns which rows there are."""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import QModelIndex, QObject

from kvscope_app.session.event_log import LoggedEvent
from kvscope_app.views.events.event_entries import EventEntries, Index
from kvscope_app.views.events.event_search import IntArray
from kvscope_telemetry.summaries.event_index import EventIndex
from kvscope_telemetry.summaries.summary import TimedEvent


class IndexModel(EventEntries):
    """Times of a course are wall clock already."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(0, parent)
        self._events = EventIndex()
        self._serials: IntArray = np.empty(0, np.int64)

    def show_serials(self, events: EventIndex, serials: IntArray) -> None:
        """These events, ascending; rows that stay are left alone."""
        kept = self._serials[int(np.searchsorted(self._serials, events.num_forgotten)) :]
        if events is not self._events or not np.array_equal(serials[: kept.size], kept):
            self.beginResetModel()
            self._events, self._serials = events, serials
            self.endResetModel()
            return
        num_gone, num_fresh = self._serials.size - kept.size, serials.size - kept.size
        if num_gone:
            self.beginRemoveRows(QModelIndex(), kept.size, self._serials.size - 1)
            self._serials = kept
            self.endRemoveRows()
        if num_fresh:
            self.beginInsertRows(QModelIndex(), 0, num_fresh - 1)
            self._serials = serials
            self.endInsertRows()

    def timed_at(self, row: int) -> TimedEvent | None:
        """The event in a row; None where it was forgotten meanwhile."""
        if not 0 <= row < self._serials.size:
            return None
        place = int(self._serials[-1 - row]) - self._events.num_forgotten
        return self._events[place] if 0 <= place < len(self._events) else None

    def entry_at(self, row: int) -> LoggedEvent | None:
        timed = self.timed_at(row)
        return None if timed is None else LoggedEvent(row + 1, timed.time_ns, timed.epoch, timed.event)

    def num_ahead(self, time_ns: int) -> int:
        """How many rows, from the first on, are later than `time_ns`."""
        first = int(np.searchsorted(self._events.time_ns, time_ns, "right")) + self._events.num_forgotten
        return int(self._serials.size - np.searchsorted(self._serials, first))

    def shown_events(self) -> list[TimedEvent]:
        """All that are shown, oldest first."""
        places = self._serials - self._events.num_forgotten
        return [self._events[place] for place in places[places >= 0].tolist()]

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else int(self._serials.size)
