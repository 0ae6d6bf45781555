"""Records the step in which each cached block was evicted, by block hash. This explains why a prompt missed the
cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

MAX_HASHES: Final = 200_000
"""Maximum number of recorded hashes; the oldest are dropped first."""


class EvictedHashes:
    """Bounded map from block hash to the step of its last eviction. Used on the publishing thread only."""

    def __init__(self) -> None:
        self._steps: OrderedDict[int, int] = OrderedDict()

    def record(self, hashes: Iterable[int], step: int) -> None:
        for value in hashes:
            self._steps[value] = step
            self._steps.move_to_end(value)
        while len(self._steps) > MAX_HASHES:
            self._steps.popitem(last=False)

    def step_of(self, value: int) -> int | None:
        """Return the step in which a block with the hash `value` was evicted last; None if unknown."""
        return self._steps.get(value)

    def clear(self) -> None:
        self._steps.clear()
