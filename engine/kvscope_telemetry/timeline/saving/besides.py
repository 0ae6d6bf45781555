"""What goes with a saved part besides telemetry: bookmarks of its time as they stand, and texts of its blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from kvscope_telemetry.recorded import Recorded
from kvscope_telemetry.summaries.bookmark import Bookmark, in_order, settled
from kvscope_telemetry.texts.block_texts import RecordedText

_TEXTS_TOGETHER: Final = 256
_TEXTS_LATE_NS: Final = 5_000_000_000
"""A text is written so long after its block was so at most."""


def bookmarks_of(recorded: Recorded, from_ns: int, until_ns: int) -> list[Bookmark]:
    """Those of this time."""
    stand = in_order(settled(recorded.bookmarks()).values())
    return [each for each in stand if from_ns <= max(each.time_ns, each.until_ns) and each.time_ns <= until_ns]


def texts_of(recorded: Recorded, from_ns: int, until_ns: int) -> Iterator[list[RecordedText]]:
    """Those of this time, and of before it the newest of each block: it may still be held. Some at once."""
    if not recorded.has_texts:
        return
    before: dict[int, RecordedText] = {}
    batch: list[RecordedText] = []
    for text in recorded.texts():
        if text.time_ns < from_ns:
            before[text.block] = msgspec.structs.replace(text, time_ns=from_ns)
        elif text.time_ns <= until_ns + _TEXTS_LATE_NS:
            batch.append(msgspec.structs.replace(text, time_ns=min(text.time_ns, until_ns)))
    for texts in (list(before.values()), batch):
        for start in range(0, len(texts), _TEXTS_TOGETHER):
            yield texts[start : start + _TEXTS_TOGETHER]
