"""What happened to the picture itself, as events a person reads: gaps, restarts, what could not be read."""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.kv_events.stream_items import Gap
from kvscope_telemetry.messages.telemetry import Event

MAX_NOTES: Final = 32
"""Between two frames; of more the last says how many were left out."""
MAX_LETTERS: Final = 500


class Notes:
    """`add` them, then `take` them into a frame."""

    def __init__(self) -> None:
        self._notes: list[Event] = []
        self._num_left_out = 0

    def add(self, words: str, now_ns: int) -> None:
        """Something that a person should know."""
        if len(self._notes) < MAX_NOTES:
            self._notes.append(Event(kind="note", time_ns=now_ns, cause=words[:MAX_LETTERS]))
        else:
            self._num_left_out += 1

    def take(self, now_ns: int) -> tuple[Event, ...]:
        """All since the last call."""
        notes, self._notes = self._notes, []
        if self._num_left_out:
            notes.append(Event(kind="note", time_ns=now_ns, cause=f"{self._num_left_out} more notes of this moment"))
            self._num_left_out = 0
        return tuple(notes)


def gap_words(gap: Gap) -> str:
    """What a hole in the stream means."""
    count = gap.last - gap.first + 1
    which = f"batch {gap.first}" if count == 1 else f"{count} batches, {gap.first} to {gap.last},"
    return (
        f"{which} of KV events cannot be had ({gap.why}): "
        "blocks may be shown that are gone, and others not be shown, until their text comes again"
    )
