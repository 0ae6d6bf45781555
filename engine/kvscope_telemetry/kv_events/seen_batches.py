"""Which batches were given lately, and which were given up: what comes twice, late, or from another engine.

A publisher has no name: whether a batch is one that was seen is told by its bytes.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

MAX_SEEN: Final = 1 << 14
MAX_GAPS: Final = 256


class SeenBatches:
    """Of one start of one publisher."""

    def __init__(self) -> None:
        self._prints: dict[int, int] = {}  # the oldest first
        self._gaps: deque[tuple[int, int]] = deque(maxlen=MAX_GAPS)

    def add(self, seq: int, payload: bytes) -> None:
        """It was given, or could not be read."""
        self._prints[seq] = hash(payload)
        if len(self._prints) > MAX_SEEN:
            for old in list(islice(self._prints, MAX_SEEN // 8)):
                del self._prints[old]

    def skip(self, first: int, last: int) -> None:
        """They were given up."""
        self._gaps.append((first, last))

    def is_same(self, seq: int, payload: bytes) -> bool:
        """Whether exactly this batch was seen."""
        return self._prints.get(seq) == hash(payload)

    def was_skipped(self, seq: int) -> bool:
        """Whether it was given up."""
        return any(first <= seq <= last for first, last in self._gaps)

    def clear(self) -> None:
        """Another start."""
        self._prints.clear()
        self._gaps.clear()
