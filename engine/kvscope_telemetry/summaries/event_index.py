"""The events of a session sorted by time, with columns for searching.

Limits the number of events: the newest are retained. Must not depend on files or create texts for the user.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.messages.event_kinds import KIND_CODES
from kvscope_telemetry.summaries.summary import TimedEvent

MAX_EVENTS: Final = 200_000
_OTHER_CODE: Final = 255
_MAX_CLOCK_DRIFT_NS: Final = 250_000_000
_TIME, _EPOCH, _NUMBER, _OTHER, _KIND = range(5)


class EventIndex:
    """The newest `max_events` events. Indices count from the oldest retained one."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self.num_forgotten = 0
        self._max_events = max_events
        self._events: list[TimedEvent] = []
        self._rows = np.empty((5, 64), np.int64)

    def __len__(self) -> int:
        return len(self._events)

    def __getitem__(self, index: int) -> TimedEvent:
        return self._events[index]

    @property
    def time_ns(self) -> npt.NDArray[np.int64]:
        return self._rows[_TIME, : len(self)]

    @property
    def kind_codes(self) -> npt.NDArray[np.int64]:
        return self._rows[_KIND, : len(self)]

    def extend(self, events: Iterable[TimedEvent]) -> int:
        """Add events and return how many were added. Late events are inserted at their time."""
        fresh = sorted(events, key=attrgetter("time_ns"))
        if not fresh:
            return 0
        size = len(self)
        num_late = size - int(np.searchsorted(self.time_ns, fresh[0].time_ns, "right"))
        self._events += fresh
        self._reserve(len(self))
        self._rows[:, size : len(self)] = _rows(fresh)
        if num_late:
            order = np.argsort(self._rows[_TIME, size - num_late : len(self)], kind="stable") + (size - num_late)
            self._rows[:, size - num_late : len(self)] = self._rows[:, order]
            self._events[size - num_late :] = [self._events[index] for index in order.tolist()]
        if len(self) > self._max_events:
            self._drop(len(self) - self._max_events * 7 // 8)
        return len(fresh)

    def find(
        self,
        first_ns: int | None = None,
        last_ns: int | None = None,
        kinds: Collection[str] | None = None,
        request: tuple[int, int] | None = None,
    ) -> npt.NDArray[np.int64]:
        """Return the ascending indices of the events that match all arguments. An argument of None does not restrict
        the search.

        Args:
            first_ns: Earliest time.
            last_ns: Latest time.
            kinds: Kinds of events.
            request: Epoch and number of a request that the event happened to, or that caused it.
        """
        begin = 0 if first_ns is None else int(np.searchsorted(self.time_ns, first_ns, "left"))
        end = len(self) if last_ns is None else int(np.searchsorted(self.time_ns, last_ns, "right"))
        rows = self._rows[:, begin:end]
        is_match = np.ones(rows.shape[1], np.bool_)
        if kinds is not None:
            is_match &= np.isin(rows[_KIND], [KIND_CODES.get(kind, _OTHER_CODE) for kind in kinds])
        if request is not None:
            epoch, number = request
            is_match &= (rows[_EPOCH] == epoch) & ((rows[_NUMBER] == number) | (rows[_OTHER] == number))
        indices: npt.NDArray[np.int64] = np.flatnonzero(is_match) + begin
        return indices

    def index_of(self, timed: TimedEvent) -> int | None:
        """Return the index of an event, or None if it is not retained. The event's time may differ from the
        retained one by up to `_MAX_CLOCK_DRIFT_NS`, because two clocks can drift apart.
        """
        indices = self.find(
            timed.time_ns - _MAX_CLOCK_DRIFT_NS, timed.time_ns + _MAX_CLOCK_DRIFT_NS, (timed.event.kind,)
        )
        events = ((index, self._events[index]) for index in indices.tolist())
        return next((index for index, each in events if (each.epoch, each.event) == (timed.epoch, timed.event)), None)

    def neighbor(
        self, shown: TimedEvent | None, at_ns: int, kinds: Collection[str] | None, *, forward: bool
    ) -> TimedEvent | None:
        """Return the next event after `shown`, or the previous one if not `forward`, with one of `kinds` (None allows
        all kinds). If `shown` is None, start at `at_ns`.

        Several events may have the time of one frame, so a search by time alone would skip some.
        """
        index = None if shown is None else self.index_of(shown)
        if index is None:
            found = self.find(at_ns + 1, None, kinds)[:1] if forward else self.find(None, at_ns - 1, kinds)[-1:]
        else:
            time_ns = int(self.time_ns[index])
            candidates = self.find(time_ns, None, kinds) if forward else self.find(None, time_ns, kinds)
            found = candidates[candidates > index][:1] if forward else candidates[candidates < index][-1:]
        return self[int(found[0])] if found.size else None

    def forget_before(self, time_ns: int) -> None:
        self._drop(int(np.searchsorted(self.time_ns, time_ns, "left")))

    def _drop(self, count: int) -> None:
        if count:
            remaining = self._rows[:, count : len(self)].copy()
            del self._events[:count]
            self._rows[:, : len(self)] = remaining
            self.num_forgotten += count

    def _reserve(self, size: int) -> None:
        while self._rows.shape[1] < size:
            self._rows = np.concatenate((self._rows, np.empty_like(self._rows)), axis=1)


def _rows(fresh: Sequence[TimedEvent]) -> npt.NDArray[np.int64]:
    events = [timed.event for timed in fresh]
    return np.array(
        [
            [timed.time_ns for timed in fresh],
            [timed.epoch for timed in fresh],
            [event.number for event in events],
            [event.other for event in events],
            [KIND_CODES.get(event.kind, _OTHER_CODE) for event in events],
        ],
        np.int64,
    )
