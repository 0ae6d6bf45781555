"""Keyframes and leaps that were read, kept for the next seek: who looks for a moment comes back to the same ones.

Owns how much is kept, however long what is read is: what was not wanted for longest goes first. One thread uses it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kvscope_telemetry.recordings.request_index import TimedMessage

MAX_KEPT_BYTES: Final = 160 << 20
"""Some half an hour of 100,000 blocks, or a few keyframes of a million."""


class KeptMessages:
    """By the file they are of, whoever stands for it, and the place of their chunk in it."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[object, int], tuple[TimedMessage, int]] = OrderedDict()
        self.num_bytes = 0

    def get(self, file: object, offset: int) -> TimedMessage | None:
        """None: it is to be read."""
        found = self._kept.get((file, offset))
        if found is None:
            return None
        self._kept.move_to_end((file, offset))
        return found[0]

    def keep(self, file: object, offset: int, timed: TimedMessage, num_bytes: int) -> None:
        """What was read there, of so many bytes; others go for it."""
        if num_bytes > self._max_bytes or (file, offset) in self._kept:
            return
        self._kept[file, offset] = timed, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._kept.popitem(last=False)[1][1]
