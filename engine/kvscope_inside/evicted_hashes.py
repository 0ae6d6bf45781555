"""When cached blocks were evicted, by their hashes: why a prompt did not find what was there once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

MAX_KNOWN: Final = 200_000
"""The newest are remembered."""


class EvictedHashes:
    """Bounded, whatever is noted. Belongs to the thread that tells."""

    def __init__(self) -> None:
        self._steps: OrderedDict[int, int] = OrderedDict()

    def note(self, hashes: Iterable[int], step: int) -> None:
        """Blocks with these hashes were evicted in a step, the last of them last."""
        for value in hashes:
            self._steps[value] = step
            self._steps.move_to_end(value)
        while len(self._steps) > MAX_KNOWN:
            self._steps.popitem(last=False)

    def step_of(self, value: int) -> int | None:
        """When a block with this hash was evicted last; None: that is not known."""
        return self._steps.get(value)

    def clear(self) -> None:
        """The cache was emptied: nobody misses what was evicted before."""
        self._steps.clear()
