"""Finds events of an index that pass a filter: by kind and request on columns, by text a bounded number per call.

Owns the filter and the text matches found so far. An event is identified by its serial: its index counted from the
first event ever recorded. Imports no Qt.
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
"""Number of newest events among which a late event may be inserted."""
_NUMBER: Final = re.compile(r"#(\d{1,18})")


class EventSearch:
    """Search of an index. Call `update`; `serials` are the matches found so far, ascending."""

    def __init__(self) -> None:
        self.serials: IntArray = np.empty(0, np.int64)
        self.kinds: frozenset[str] | None = None
        """Kinds to match; None: all."""
        self.request: tuple[int, int] | None = None
        """(epoch, number) of the request to match; None: any."""
        self.span: TimeSpan | None = None
        """Time range to match; None: any."""
        self._words: tuple[str, ...] = ()
        self._verdicts = np.empty(0, np.uint8)
        self._first_serial = 0
        """Serial of the first verdict."""
        self._index: EventIndex | None = None
        self._newest: TimedEvent | None = None

    def set_kinds(self, kinds: Collection[str] | None) -> None:
        self.kinds = None if kinds is None else frozenset(kinds)

    def set_text(self, text: str) -> None:
        """Match only events with all of these words. `#12` matches request 12 only, not other numbers with these
        digits."""
        words = tuple(text.lower().split())
        if words != self._words:
            self._words = words
            self._verdicts[:] = _UNKNOWN

    def update(self, events: EventIndex, max_texts: int = 400) -> bool:
        """Search new events, newest first. Returns whether texts remain to be searched."""
        self._align_verdicts(events)
        first_ns, last_ns = (None, None) if self.span is None else (self.span.begin_ns, self.span.end_ns)
        wanted = events.find(first_ns, last_ns, self.kinds, self.request) + events.num_forgotten
        if not self._words:
            self.serials = wanted
            return False
        unknown = wanted[self._verdicts[wanted - self._first_serial] == _UNKNOWN]
        for serial in unknown[-max_texts:].tolist():
            is_match = matches(events[serial - self._first_serial].event, self._words)
            self._verdicts[serial - self._first_serial] = _YES if is_match else _NO
        self.serials = wanted[self._verdicts[wanted - self._first_serial] == _YES]
        return bool(unknown.size > max_texts)

    def _align_verdicts(self, events: EventIndex) -> None:
        """Align the verdicts with the events in the index, keeping those that are known."""
        before, begin = self._verdicts, self._first_serial
        self._first_serial = events.num_forgotten
        self._verdicts = np.full(len(events), _UNKNOWN, np.uint8)
        if events is self._index:
            kept = before[max(self._first_serial - begin, 0) :][: len(events)]
            at = len(before) + begin - self._first_serial - 1
            is_late = 0 <= at < len(events) and events[at] is not self._newest
            kept = kept[: max(kept.size - _MAX_LATE, 0)] if is_late else kept
            self._verdicts[: kept.size] = kept
        self._index = events
        self._newest = events[len(events) - 1] if len(events) else None


def matches(event: Event, words: Collection[str]) -> bool:
    """Whether the event's text contains all of the lower-case words."""
    numbers = {int(found[1]) for word in words if (found := _NUMBER.fullmatch(word))}
    if not numbers <= {event.number, event.other}:
        return False
    rest = [word for word in words if not _NUMBER.fullmatch(word)]
    text = f"{kind_text(event.kind)} {why_text(event)}".lower() if rest else ""
    return all(word in text for word in rest)
