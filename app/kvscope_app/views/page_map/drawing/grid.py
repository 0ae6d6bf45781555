"""Geometry of the page map: the grid of blocks, and the camera that views it. Lengths are in device pixels.

The map is one lattice of cells, numbered row by row. The ledger's rows fill it in order, one section per tier; each
section starts on a new row, after `gap_rows` empty rows for its heading. With one section there are no headings, and
block `id` is in cell `id`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

MIN_CELL_PITCH: Final = 4
"""Minimum pitch in pixels at which each cell is drawn with a gap, on an integral number of pixels."""
MAX_PITCH: Final = 112

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks of one tier: `size` blocks from block `start`, in consecutive cells from `first_cell`."""

    start: int
    size: int
    first_row: int
    """Grid row of the first block, below the heading."""
    first_cell: int

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class Grid:
    """Arrangement of `num_blocks` blocks in rows of `columns` cells.

    `sizes` has the number of blocks in each section, and is empty for a single section. `gap_rows` is the number of
    empty rows above each section.
    """

    num_blocks: int
    columns: int
    sizes: tuple[int, ...] = ()
    gap_rows: int = 0
    sections: tuple[Section, ...] = field(init=False, compare=False)
    _shifts: tuple[tuple[int, int], ...] = field(init=False, compare=False, repr=False)
    """(first block, number of cells skipped before it) for each section except the first."""

    def __post_init__(self) -> None:
        sections: list[Section] = []
        row = start = 0
        for size in self.sizes or (self.num_blocks,):
            row += self.gap_rows
            sections.append(Section(start, size, row, row * self.columns))
            row, start = row + -(-size // self.columns), start + size
        assert start == self.num_blocks, "sections hold every block"
        shifts = [s.first_cell - s.start for s in sections]
        steps = zip(sections[1:], shifts, shifts[1:], strict=False)
        object.__setattr__(self, "sections", tuple(sections))
        object.__setattr__(self, "_shifts", tuple((s.start, after - before) for s, before, after in steps))

    @property
    def rows(self) -> int:
        last = self.sections[-1]
        return last.first_row - (-last.size // self.columns)

    @property
    def num_cells(self) -> int:
        return self.rows * self.columns

    def cells_of(self, ids: npt.NDArray[np.uint32]) -> Index:
        """Return the cell index of each block, in the shape of `ids`."""
        cells = ids.astype(np.int64)
        if self._shifts or self.gap_rows:
            cells += self.sections[0].first_cell
            for start, offset in self._shifts:
                cells[ids >= start] += offset
        return cells

    def blocks_of(self, cells: Index) -> Index:
        """Return the block in each cell, -1 for a cell without a block, in the shape of `cells`."""
        blocks = np.full(cells.shape, -1, np.int64)
        for section in self.sections:
            number = cells - section.first_cell
            inside = (number >= 0) & (number < section.size)
            blocks[inside] = number[inside] + section.start
        return blocks

    def position_of(self, block: int) -> tuple[int, int]:
        section = self.section_of(block)
        return divmod(block - section.start + section.first_cell, self.columns)

    def section_of(self, block: int) -> Section:
        return next(section for section in reversed(self.sections) if block >= section.start)

    def step_from(self, block: int, dx: int, dy: int) -> int:
        """Return the block `dx` blocks after `block`, or `dy` rows below it, skipping headings; 0 if `block` is -1."""
        if block < 0:
            return 0
        if not dy:
            return min(max(0, block + dx), self.num_blocks - 1)
        row, column = self.position_of(block)
        row += dy
        while 0 <= row < self.rows:
            if (block_below := self.block_at(row, column)) is not None:
                return block_below
            row += 1 if dy > 0 else -1
        return self.num_blocks - 1 if dy > 0 else 0

    def block_at(self, row: int, column: int) -> int | None:
        """Return the block in a cell; None outside the sections and in heading rows."""
        if not (0 <= column < self.columns and row >= 0):
            return None
        cell = row * self.columns + column
        for section in self.sections:
            if 0 <= cell - section.first_cell < section.size:
                return cell - section.first_cell + section.start
        return None


@dataclass(frozen=True, slots=True)
class Camera:
    """Viewport of the grid. The grid's top left corner is at pixel (`x`, `y`); a cell with its gap has `pitch` pixels
    per side.
    """

    pitch: float
    x: float
    y: float

    def cell_at(self, px: float, py: float) -> tuple[int, int]:
        """Return the (row, column) under a pixel, possibly outside the grid."""
        return math.floor((py - self.y) / self.pitch), math.floor((px - self.x) / self.pitch)

    def corner_of(self, row: int, column: int) -> tuple[float, float]:
        return self.x + column * self.pitch, self.y + row * self.pitch

    def zoomed(self, factor: float, px: float, py: float, min_pitch: float) -> Camera:
        """Return the camera zoomed by `factor` around pixel (px, py), which keeps its position in the grid."""
        pitch = _snapped(min(max(self.pitch * factor, min_pitch), MAX_PITCH))
        if pitch == self.pitch and self.pitch >= MIN_CELL_PITCH:
            pitch = _snapped(min(max(self.pitch + (1 if factor > 1 else -1), min_pitch), MAX_PITCH))
        share = pitch / self.pitch
        return Camera(pitch, px - (px - self.x) * share, py - (py - self.y) * share)

    def clamped(self, grid: Grid, width: int, height: int) -> Camera:
        """Return the camera moved so that the grid covers the window, or is centred if it is smaller."""
        x = _clamp_axis(self.x, grid.columns * self.pitch, width)
        y = _clamp_axis(self.y, grid.rows * self.pitch, height)
        return replace(self, x=float(round(x)), y=float(round(y)))


def _snapped(pitch: float) -> float:
    return float(round(pitch)) if pitch >= MIN_CELL_PITCH else pitch


def _clamp_axis(offset: float, extent: float, window: int) -> float:
    if extent <= window:
        return (window - extent) / 2
    return min(0.0, max(offset, window - extent))
