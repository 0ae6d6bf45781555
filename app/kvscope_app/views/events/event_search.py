"""Searches the events of an index. Text is compared with a limited number of events per call, because that is slow.

Kind, request and time are compared with columns of the index. Owns the filter and the text matches found so far. An
event is identified by its serial: its index counted from the first event ever recorded. Imports no Qt.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.session.time_span import TimeSpan
from kvscope_app.views.events.event_entries import why_text
from kvscope_telemetry.messages.event_kinds import kind_text
from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.summaries.event_index import EventIndex
from kvscope_telemetry.summaries.summary import TimedEvent

IntArray = npt.NDArray[np.int64]
_UNKNOWN, _NO, _YES = range(3)
_MAX_LATE: Final = 1024
"""Number of newest events that are searched again when an event was inserted among them, because it arrived out
of order.
"""
_NUMBER: Final = re.compile(r"#(\d{1,18})")


class EventSearch:
    """Search for events. After `update`, `serials` has the matches found so far, ascending, shape (n,)."""

    def __init__(self) -> None:
        self.serials: IntArray = np.empty(0, np.int64)
        self.kinds: frozenset[str] | None = None
        """Event kinds to match, or None for all kinds."""
        self.request: tuple[int, int] | None = None
        """(epoch, number) of the request to match, or None for all requests."""
        self.span: TimeSpan | None = None
        self._words: tuple[str, ...] = ()
        self._verdicts = np.empty(0, np.uint8)
        self._first_serial = 0
        """Serial of the event to which the first entry of `_verdicts` belongs."""
        self._index: EventIndex | None = None
        self._newest: TimedEvent | None = None

    def set_kinds(self, kinds: Collection[str] | None) -> None:
        self.kinds = None if kinds is None else frozenset(kinds)

    def set_text(self, text: str) -> None:
        """Match only events that contain all words of `text`.

        The word `#12` matches request 12, not other numbers that contain these digits.
        """
        words = tuple(text.lower().split())
        if words != self._words:
            self._words = words
            self._verdicts[:] = _UNKNOWN

    def update(self, events: EventIndex, max_texts: int = 400) -> bool:
        """Search `events`, newest first. Returns whether more than `max_texts` texts remained to be compared."""
        self._align_verdicts(events)
        first_ns, last_ns = (None, None) if self.span is None else (self.span.begin_ns, self.span.end_ns)
        candidates = events.find(first_ns, last_ns, self.kinds, self.request) + events.num_forgotten
        if not self._words:
            self.serials = candidates
            return False
        unknown = candidates[self._verdicts[candidates - self._first_serial] == _UNKNOWN]
        for serial in unknown[-max_texts:].tolist():
            is_match = matches(events[serial - self._first_serial].event, self._words)
            self._verdicts[serial - self._first_serial] = _YES if is_match else _NO
        self.serials = candidates[self._verdicts[candidates - self._first_serial] == _YES]
        return bool(unknown.size > max_texts)

    def _align_verdicts(self, events: EventIndex) -> None:
        """Shift `_verdicts` to the events that the index contains now. New events get `_UNKNOWN`."""
        old_verdicts, old_first_serial = self._verdicts, self._first_serial
        self._first_serial = events.num_forgotten
        self._verdicts = np.full(len(events), _UNKNOWN, np.uint8)
        if events is self._index:
            still_valid = old_verdicts[max(self._first_serial - old_first_serial, 0) :][: len(events)]
            newest_index = len(old_verdicts) + old_first_serial - self._first_serial - 1
            has_late_event = 0 <= newest_index < len(events) and events[newest_index] is not self._newest
            still_valid = still_valid[: max(still_valid.size - _MAX_LATE, 0)] if has_late_event else still_valid
            self._verdicts[: still_valid.size] = still_valid
        self._index = events
        self._newest = events[len(events) - 1] if len(events) else None


def matches(event: Event, words: Collection[str]) -> bool:
    """Whether the event's text contains all of `words`, which are in lower case."""
    numbers = {int(match[1]) for word in words if (match := _NUMBER.fullmatch(word))}
    if not numbers <= {event.number, event.other}:
        return False
    text_words = [word for word in words if not _NUMBER.fullmatch(word)]
    text = f"{kind_text(event.kind)} {why_text(event)}".lower() if text_words else ""
    return all(word in text for word in text_words)
