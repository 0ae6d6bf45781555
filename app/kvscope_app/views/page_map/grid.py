"""Where blocks lie: rows and columns of the page map, and the camera that looks at them. Pure geometry.

All lengths are device pixels. Block `id` is at row `id // columns`, column `id % columns`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

MIN_CELL_PITCH: Final = 4
"""From this pitch on cells are drawn one by one, with a gap and at a whole number of pixels."""
MAX_FIT_PITCH: Final = 48
MAX_PITCH: Final = 112
_ROUND_COLUMNS: Final = (16, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class Grid:
    """`num_blocks` blocks in rows of `columns`."""

    num_blocks: int
    columns: int

    @property
    def rows(self) -> int:
        """Rows, the last one perhaps not full."""
        return -(-self.num_blocks // self.columns)

    def block_at(self, row: int, column: int) -> int | None:
        """The block of a cell, None outside."""
        if not (0 <= column < self.columns and row >= 0):
            return None
        block = row * self.columns + column
        return block if block < self.num_blocks else None


@dataclass(frozen=True, slots=True)
class Camera:
    """The grid's corner is at pixel (`x`, `y`), a cell with its gap is `pitch` pixels wide and high."""

    pitch: float
    x: float
    y: float

    def cell_at(self, px: float, py: float) -> tuple[int, int]:
        """(row, column) under a pixel, which may lie outside the grid."""
        return math.floor((py - self.y) / self.pitch), math.floor((px - self.x) / self.pitch)

    def corner_of(self, row: int, column: int) -> tuple[float, float]:
        """The pixel of a cell's top left corner."""
        return self.x + column * self.pitch, self.y + row * self.pitch

    def zoomed(self, factor: float, px: float, py: float, min_pitch: float) -> Camera:
        """Closer by `factor`, with what is under pixel (px, py) staying there."""
        pitch = _snapped(min(max(self.pitch * factor, min_pitch), MAX_PITCH))
        if pitch == self.pitch and self.pitch >= MIN_CELL_PITCH:
            pitch = _snapped(min(max(self.pitch + (1 if factor > 1 else -1), min_pitch), MAX_PITCH))
        share = pitch / self.pitch
        return Camera(pitch, px - (px - self.x) * share, py - (py - self.y) * share)

    def clamped(self, grid: Grid, width: int, height: int) -> Camera:
        """Moved so that the grid fills the window as far as it can, or is centred in it."""
        x = _clamp_axis(self.x, grid.columns * self.pitch, width)
        y = _clamp_axis(self.y, grid.rows * self.pitch, height)
        return replace(self, x=float(round(x)), y=float(round(y)))


def fit(num_blocks: int, width: int, height: int) -> tuple[Grid, Camera]:
    """The grid and camera that show all blocks as large as they can be in `width` x `height` pixels."""
    columns, pitch = _whole_pitch(num_blocks, width, height) or _dense_pitch(num_blocks, width, height)
    grid = Grid(num_blocks, columns)
    return grid, Camera(pitch, 0.0, 0.0).clamped(grid, width, height)


def _whole_pitch(num_blocks: int, width: int, height: int) -> tuple[int, float] | None:
    for pitch in range(MAX_FIT_PITCH, MIN_CELL_PITCH - 1, -1):
        most, max_rows = width // pitch, height // pitch
        if most * max_rows < num_blocks:
            continue
        for divisor in _ROUND_COLUMNS:  # rows that begin at round block ids, where that costs nothing
            columns = most - most % divisor
            if columns and columns * max_rows >= num_blocks:
                return min(columns, num_blocks), float(pitch)
    return None


def _dense_pitch(num_blocks: int, width: int, height: int) -> tuple[int, float]:
    near = math.sqrt(num_blocks * width / max(1, height))
    low, high = max(1, int(near * 0.9)), int(near * 1.1) + 2
    candidates = ((min(width / c, height / -(-num_blocks // c)), c) for c in range(low, high))
    pitch, columns = max(candidates)
    return min(columns, num_blocks), min(pitch, float(MIN_CELL_PITCH) - 0.01)


def _snapped(pitch: float) -> float:
    return float(round(pitch)) if pitch >= MIN_CELL_PITCH else pitch


def _clamp_axis(offset: float, extent: float, window: int) -> float:
    if extent <= window:
        return (window - extent) / 2
    return min(0.0, max(offset, window - extent))
