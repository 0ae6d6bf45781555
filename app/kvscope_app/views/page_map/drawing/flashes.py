"""Recently changed blocks, whose cells flash and fade. Uses numpy only; times are in nanoseconds."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from kvscope_app.views.page_map.drawing.cells import Ids, distinct
from kvscope_app.views.page_map.drawing.flash_kinds import FIRST_MOVE_LEVEL, LEVELS, FlashKind, level_below, top_level

MAX_CHANGED_BLOCKS: Final = 4096
"""Maximum number of blocks that flash for changes in one frame. If more change, none flashes, because single blocks
could not be distinguished.
"""
MAX_MOVES_AT_ONCE: Final = 1024
"""Maximum number of flashes per kind of move and frame, to limit the drawing time. Only the newest moves flash."""

LitCells = list[tuple[int, Ids]]
"""(level, block ids) pairs of flashing cells to draw."""


class Flashes:
    """Flash level of each block over time. `change` and `move` start flashes; `fade` returns which cells to redraw."""

    def __init__(self, num_blocks: int) -> None:
        self._lit_ns = np.zeros(num_blocks, np.int64)
        self._level = np.zeros(num_blocks, np.uint8)
        self._batches: tuple[deque[tuple[int, Ids]], ...] = tuple(deque() for _ in LEVELS)

    @property
    def is_active(self) -> bool:
        return any(self._batches)

    def change(self, ids: Ids, now_ns: int) -> LitCells:
        """Flash `ids` as changed, except blocks that still flash for a move. Returns all of `ids` with their levels."""
        level = self._level[ids]
        moving = level >= FIRST_MOVE_LEVEL
        if not moving.any():
            return [(self._light(ids, FlashKind.CHANGED, now_ns), ids)]
        unmoved = ids[~moving]
        moved = [(int(lit), ids[level == lit]) for lit in np.unique(level[moving])]
        return [(self._light(unmoved, FlashKind.CHANGED, now_ns), unmoved), *moved]

    def move(self, kind: FlashKind, ids: Ids, now_ns: int) -> LitCells:
        """Flash `ids` (oldest first, possibly repeated) for the move `kind`. Returns the blocks that flash, with their
        level.
        """
        newest = distinct(ids[-MAX_MOVES_AT_ONCE:])
        return [(self._light(newest, kind, now_ns), newest)] if newest.size else []

    def fade(self, now_ns: int) -> LitCells:
        """Lower the level of flashes that are old enough at `now_ns`. Returns their blocks with the new levels.

        Blocks that have started a newer flash are left out.
        """
        result = []
        for level in reversed(range(1, len(LEVELS))):
            queue = self._batches[level]
            while queue and now_ns - queue[0][0] >= LEVELS[level].fade_ns:
                lit_ns, ids = queue.popleft()
                fading = ids[(self._lit_ns[ids] == lit_ns) & (self._level[ids] == level)]
                if fading.size:
                    next_level = level_below(level)
                    self._level[fading] = next_level
                    result.append((next_level, fading))
                    if next_level:
                        self._batches[next_level].append((lit_ns, fading))
        return result

    def clear(self) -> None:
        self._level.fill(0)
        for queue in self._batches:
            queue.clear()

    def _light(self, ids: Ids, kind: FlashKind, now_ns: int) -> int:
        level = top_level(kind) if 0 < ids.size <= MAX_CHANGED_BLOCKS else 0
        self._lit_ns[ids] = now_ns
        self._level[ids] = level
        if level:
            self._batches[level].append((now_ns, ids))
        return level
