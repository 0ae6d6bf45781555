"""The summaries and events of a saved part: those of whole seconds in its middle as they lie, the others made anew.

Owns which seconds are which. Where both kinds meet in a chunk it is written anew without what was made already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from kvscope_telemetry.recordings.annotations import Entry, glance_entries
from kvscope_telemetry.recordings.copying.stored_records import StoredRecords
from kvscope_telemetry.recordings.layout import EVENT_LISTS, EVENTS, SUMMARIES
from kvscope_telemetry.summaries.summary import (
    SECOND_NS,
    Summary,
    TimedEvent,
    decode_event_list,
    decode_glances,
    encode,
)
from kvscope_telemetry.timeline.saving.opened import Opened
from kvscope_telemetry.timeline.saving.pieces import Piece


def summarized_until(pieces: Sequence[Piece], files: Opened) -> int:
    """The end of the last second that has a summary in these chunks, 0 without any: events of later ones may lie beside
    it. Raises NotAsWritten."""
    for piece in reversed(pieces):
        if SUMMARIES in piece.chunk.counts:
            return SECOND_NS + max(raw.log_time_ns for raw in files.records(piece).messages if raw.channel == SUMMARIES)
    return 0


class Seconds:
    """Chunks go through `take` in the order they were written; those of the seconds from `from_ns` to `until_ns` (not
    included) are wanted, without the events of `known`, and none of before `begin_ns`."""

    def __init__(self, begin_ns: int, from_ns: int, until_ns: int, known: Iterable[TimedEvent]) -> None:
        self._begin_ns, self._from_ns, self._until_ns = begin_ns, from_ns, until_ns
        self._known = Counter(map(encode, known))
        self._are_over = False
        self._is_within = False  # a chunk before told of the first second

    @property
    def are_over(self) -> bool:
        """Whether a chunk told of seconds behind those that are wanted."""
        return self._are_over

    def take(self, stored: StoredRecords) -> list[Entry] | None:
        """What of a chunk is to be written; None: the chunk itself."""
        seconds = [raw.log_time_ns for raw in stored.messages if raw.channel == SUMMARIES]
        is_whole = self._is_within and stored.chunk.end_ns < self._until_ns  # events of a second may lie before it
        self._is_within = self._is_within or any(at_ns >= self._from_ns for at_ns in seconds)
        return None if is_whole else self.rest(stored)

    def rest(self, stored: StoredRecords) -> list[Entry]:
        """What of a chunk is wanted, one by one."""
        seconds = [raw.log_time_ns for raw in stored.messages if raw.channel == SUMMARIES]
        self._are_over = self._are_over or any(at_ns >= self._until_ns for at_ns in seconds)
        return glance_entries(self._wanted(_told(stored)))

    def _wanted(self, told: Iterable[Summary | TimedEvent]) -> Iterator[Summary | TimedEvent]:
        for item in told:
            if isinstance(item, Summary):
                if self._from_ns <= item.time_ns < self._until_ns:
                    yield item
            elif self._begin_ns < item.time_ns < self._until_ns and not self._is_known(item):
                yield item

    def _is_known(self, event: TimedEvent) -> bool:
        data = encode(event)
        if not self._known[data]:
            return False
        self._known[data] -= 1
        return True


def _told(stored: StoredRecords) -> Sequence[Summary | TimedEvent]:
    alone = [(raw.channel == EVENTS, raw.data) for raw in stored.messages if raw.channel in (SUMMARIES, EVENTS)]
    told = [item for item in decode_glances(alone) if item is not None]
    for raw in stored.messages:
        if raw.channel == EVENT_LISTS:
            told += decode_event_list(raw.data)
    return told
