"""How large the cells of a map can be so that all of it is in a window: pure geometry, in device pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kvscope_app.views.page_map.drawing.grid import MIN_CELL_PITCH, Camera, Grid

MAX_FIT_PITCH: Final = 48
_ROUND_COLUMNS: Final = (16, 8, 4, 2, 1)
_BARE_SEPARATOR: Final = 2
"""Pixels between sections of a window with no room for headings."""


def fit(num_blocks: int, width: int, height: int, sizes: tuple[int, ...] = (), heading: int = 0) -> tuple[Grid, Camera]:
    """The grid and camera that show all blocks as large as they can be in `width` x `height` pixels.

    `sizes`: blocks of each section, () for a single one without heading; `heading`: pixels one is high.
    """
    shape = _Shape(sizes or (num_blocks,), heading_height(len(sizes), height, heading))
    columns, pitch = _whole_pitch(shape, width, height) or _dense_pitch(shape, width, height)
    grid = Grid(num_blocks, columns, sizes, shape.gap_rows(pitch))
    return grid, Camera(pitch, 0.0, 0.0).clamped(grid, width, height)


def heading_height(num_sections: int, height: int, wanted: int) -> int:
    """Pixels of each heading: as wanted, or a bare separator where they would take half of the window."""
    if num_sections < 2:
        return 0
    return wanted if 2 * num_sections * wanted <= height else _BARE_SEPARATOR


@dataclass(frozen=True, slots=True)
class _Shape:
    """What must find room."""

    sizes: tuple[int, ...]
    heading: int

    @property
    def num_blocks(self) -> int:
        return sum(self.sizes)

    @property
    def widest(self) -> int:
        """More columns than this are of no use."""
        return max(self.sizes)

    def gap_rows(self, pitch: float) -> int:
        """Rows of this pitch a heading takes."""
        return gap_rows(self.heading, pitch)

    def block_rows(self, columns: int) -> int:
        """Rows that hold blocks."""
        return sum(-(-size // columns) for size in self.sizes)


def gap_rows(heading: int, pitch: float) -> int:
    """Whole rows of `pitch` that a heading takes."""
    return math.ceil(heading / pitch)


def _whole_pitch(shape: _Shape, width: int, height: int) -> tuple[int, float] | None:
    for pitch in range(MAX_FIT_PITCH, MIN_CELL_PITCH - 1, -1):
        most, max_rows = width // pitch, height // pitch - len(shape.sizes) * shape.gap_rows(pitch)
        if max_rows < 1 or most * max_rows < shape.num_blocks:
            continue
        for divisor in _ROUND_COLUMNS:  # rows that begin at round block ids, where that costs nothing
            columns = most - most % divisor
            if columns and shape.block_rows(columns) <= max_rows:
                return min(columns, shape.widest), float(pitch)
    return None


def _dense_pitch(shape: _Shape, width: int, height: int) -> tuple[int, float]:
    num_blocks = shape.num_blocks
    # A heading is a whole number of rows, so up to a pitch more than it asks for.
    room = max(1, height - len(shape.sizes) * (shape.heading + MIN_CELL_PITCH if shape.heading else 0))
    near = math.sqrt(num_blocks * width / room)
    low, high = max(1, int(near * 0.9)), int(near * 1.1) + 2
    candidates = ((min(width / c, room / shape.block_rows(c)), c) for c in range(low, high))
    pitch, columns = max(candidates)
    return min(columns, shape.widest), min(pitch, float(MIN_CELL_PITCH) - 0.01)
