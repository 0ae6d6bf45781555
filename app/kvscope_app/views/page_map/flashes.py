"""Which blocks changed a moment ago, so that their cells light up and fade. numpy alone; times in nanoseconds."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from kvscope_app.views.page_map.cells import Ids

FADE_NS: Final = (0, 320_000_000, 140_000_000)
"""`FADE_NS[level]`: the age at which a flash of `level` goes down by one."""
TOP_LEVEL: Final = len(FADE_NS) - 1
MAX_AT_ONCE: Final = 4096
"""A change of more blocks than this at once does not flash: everything moving shows nothing."""


class Flashes:
    """Flash level of each block over time: `add` what changed, `fade` says what to draw anew."""

    def __init__(self, num_blocks: int) -> None:
        self._changed_ns = np.zeros(num_blocks, np.int64)
        self._batches: tuple[deque[tuple[int, Ids]], ...] = tuple(deque() for _ in FADE_NS)

    @property
    def active(self) -> bool:
        """Whether anything is still lit."""
        return any(self._batches)

    def add(self, ids: Ids, now_ns: int) -> int:
        """Blocks `ids` changed; returns the level to draw them at."""
        self._changed_ns[ids] = now_ns
        if not 0 < ids.size <= MAX_AT_ONCE:
            return 0
        self._batches[TOP_LEVEL].append((now_ns, ids))
        return TOP_LEVEL

    def fade(self, now_ns: int) -> list[tuple[int, Ids]]:
        """(new level, ids) of flashes that went down since; blocks that changed again are left out."""
        result = []
        for level in range(1, len(FADE_NS)):
            queue = self._batches[level]
            while queue and now_ns - queue[0][0] >= FADE_NS[level]:
                lit_ns, ids = queue.popleft()
                still = ids[self._changed_ns[ids] == lit_ns]
                if still.size:
                    result.append((level - 1, still))
                    if level > 1:
                        self._batches[level - 1].append((lit_ns, still))
        return result

    def clear(self) -> None:
        """Put all flashes out."""
        for queue in self._batches:
            queue.clear()
