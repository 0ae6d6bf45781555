"""Page map without a window: blocks, camera, pixels, and the pixel rows that changed. Uses numpy only.

Owns the user's choices (mode, camera, selection). Every method that changes pixels returns the span of pixel rows
(first, end) that it touched, or None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.views.page_map.color_modes import STATE, ColorMode
from kvscope_app.views.page_map.drawing.cells import CellRaster, Cells, DenseRaster, Ids
from kvscope_app.views.page_map.drawing.flash_kinds import FIRST_MOVE_LEVEL, FlashKind
from kvscope_app.views.page_map.drawing.flashes import Flashes, LitCells
from kvscope_app.views.page_map.drawing.grid import MIN_CELL_PITCH, Camera, Grid
from kvscope_app.views.page_map.drawing.ink import Pixels, ink_of
from kvscope_telemetry.ledger import Ledger

MAX_FIT_PITCH: Final = 48
_ROUND_COLUMNS: Final = (16, 8, 4, 2, 1)
_BARE_SEPARATOR: Final = 2
"""Height in pixels of the gap between sections in a window too small for headings."""
Span = tuple[int, int] | None

_ALL_AT_ONCE: Final = 4
"""If more than one block in this many changed, a full redraw is cheaper than drawing the changed blocks."""


class Scene:
    """Ledger viewed through a camera, drawn into `pixels` of shape (height, width)."""

    def __init__(self) -> None:
        self.pixels: Pixels = np.zeros((1, 1), np.uint32)
        self.mode = STATE
        self.flashing = True
        self.has_filled = True
        """Whether the ledger says how full blocks are. Takes effect with the next `set_ledger`."""
        self.has_addresses = True
        """Whether rows are memory addresses; otherwise row numbers at the left edge have no meaning."""
        self.is_fitted = True
        self.grid = Grid(1, 1)
        self.camera = Camera(1.0, 0.0, 0.0)
        self.cells: Cells | None = None
        self._theme = DARK
        self._ink = ink_of(self.mode, self._theme)
        self._raster: CellRaster | DenseRaster | None = None
        self._flashes = Flashes(0)
        self._sizes: tuple[int, ...] = ()
        self._wanted_heading = 0
        self._last_used: npt.NDArray[np.uint32] | None = None
        self._aged_step = 0
        """Step for which the ages are drawn."""

    @property
    def height(self) -> int:
        return len(self.pixels)

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])

    @property
    def is_fading(self) -> bool:
        """Whether flashes remain that `fade` has to dim later."""
        return self._flashes.active

    def set_ledger(self, ledger: Ledger, block_size: int, step: int, sizes: tuple[int, ...] = ()) -> Span:
        """Switch to `ledger`. The camera is kept if the number of blocks and the sections stay the same.

        `sizes`: rows of each tier, () for one section without a heading.
        """
        selected = self.cells.selected if self.cells is not None and self.cells.has_selection else None
        same_size = self.cells is not None and self.grid.num_blocks == ledger.num_blocks and self._sizes == sizes
        if not same_size:
            self._sizes = sizes
            self.is_fitted = True
            self.grid, self.camera = self._fit(ledger.num_blocks)
            self._flashes = Flashes(ledger.num_blocks)
        self.cells = Cells(ledger, self.grid, block_size, self.mode)
        self.cells.has_filled = self.has_filled
        self.cells.step, self.cells.last_used = step, self._last_used
        self._flashes.clear()
        self.cells.select(selected)
        return self._redraw(fresh_ranks=True)

    @property
    def heading_height(self) -> int:
        """Height of a section's heading in pixels; 0 if there are no headings."""
        return heading_height(len(self._sizes), self.height, self._wanted_heading)

    def resize(self, width: int, height: int, heading: int = 0) -> Span:
        """Replace the pixel buffer. Refits if all blocks were shown, otherwise keeps the centre of the view.

        `heading`: height that a section's heading needs, in pixels.
        """
        if (height, width) == self.pixels.shape and heading == self._wanted_heading:
            return None
        self._wanted_heading = heading
        dx, dy = (width - self.width) / 2, (height - self.height) / 2
        self.pixels = np.zeros((max(1, height), max(1, width)), np.uint32)
        if self.is_fitted:
            return self.fit_all()
        return self._look(Camera(self.camera.pitch, self.camera.x + dx, self.camera.y + dy))

    def set_theme(self, theme: Theme) -> Span:
        self._theme = theme
        return self._recolor()

    def set_mode(self, mode: ColorMode) -> Span:
        """Switch the colour mode and clear all flashes."""
        self.mode = mode
        if self.cells is not None:
            self.cells.mode = mode
        self._flashes.clear()
        return self._recolor()

    def select(self, ids: Ids | None) -> Span:
        """Highlight these blocks; None removes the highlight."""
        if self.cells is None:
            return None
        changed = self.cells.select(ids)
        return self._draw(changed, 0) if changed.size else None

    def change(self, ids: Ids, step: int, now_ns: int) -> Span:
        """Redraw and flash blocks `ids` (unique, shape (n,)) after they changed in the ledger."""
        if self.cells is None or not ids.size:
            return None
        self.cells.step = step
        self.cells.refresh(ids)
        return self._draw_lit(self._flashes.change(ids, now_ns) if self.flashing else [(0, ids)])

    def flash(self, kind: FlashKind, ids: Ids, now_ns: int) -> Span:
        """Flash blocks `ids` (oldest first) for the move `kind`."""
        if self.cells is None or not self.flashing:
            return None
        return self._draw_lit(self._flashes.move(kind, ids[ids < self.grid.num_blocks], now_ns))

    def fade(self, now_ns: int) -> Span:
        """Draw the flashes that dropped to a lower level by `now_ns`."""
        return self._draw_lit(self._flashes.fade(now_ns))

    def set_last_used(self, last_used: npt.NDArray[np.uint32]) -> None:
        """Set the step of each block's last use, including reads, shape (num_blocks,). Takes effect with the next
        draw."""
        self._last_used = last_used
        if self.cells is not None:
            self.cells.last_used = last_used

    def grow_older(self, step: int) -> Span:
        """Redraw ages as of `step` if the colour mode depends on the step."""
        if self.cells is None or not self.mode.by_step or self._aged_step == step:
            return None
        self.cells.step = step
        return self._redraw(fresh_ranks=True)

    def fit_all(self) -> Span:
        self.is_fitted = True
        if self.cells is None:
            return self._redraw()
        grid, camera = self._fit(self.grid.num_blocks)
        if grid != self.grid:
            self._regrid(grid)
        return self._look(camera)

    def zoom(self, factor: float, px: float, py: float) -> Span:
        """Zoom in (factor above 1) or out around pixel (px, py); zooming out stops where all blocks are visible."""
        least = min(self.width / self.grid.columns, self.height / self.grid.rows)
        camera = self.camera.zoomed(factor, px, py, min(least, self.camera.pitch) if factor > 1 else least)
        if factor < 1 and camera.pitch <= least:
            return self.fit_all()
        self.is_fitted = False
        return self._look(self._with_slim_headings(camera, py))

    def pan(self, dx: float, dy: float) -> Span:
        """Move the grid by pixels, up to its edges."""
        return self._look(Camera(self.camera.pitch, self.camera.x + dx, self.camera.y + dy))

    def reveal(self, block: int) -> Span:
        """Pan by the minimum that brings `block` into the window."""
        x, y = self.camera.corner_of(*self.grid.place_of(block))
        pitch = self.camera.pitch
        dx = max(0.0, -x) or min(0.0, self.width - pitch - x)
        dy = max(0.0, -y) or min(0.0, self.height - pitch - y)
        return self.pan(dx, dy) if dx or dy else None

    def block_at(self, px: float, py: float) -> int | None:
        return self.grid.block_at(*self.camera.cell_at(px, py)) if self.cells is not None else None

    def _fit(self, num_blocks: int) -> tuple[Grid, Camera]:
        return fit(num_blocks, self.width, self.height, self._sizes, self._wanted_heading)

    def _with_slim_headings(self, camera: Camera, py: float) -> Camera:
        """Adapt the number of rows that headings take to the new pitch, keeping what is at `py` fixed.

        Headings keep their height in pixels, so they take fewer rows of larger cells.
        """
        gap = gap_rows(self.heading_height, camera.pitch)
        if gap == self.grid.gap_rows:
            return camera
        row, _ = camera.cell_at(0, py)
        num_above = sum(section.first_row <= row for section in self.grid.sections)
        moved = num_above * (self.grid.gap_rows - gap) * camera.pitch
        self._regrid(replace(self.grid, gap_rows=gap))
        return replace(camera, y=camera.y + moved)

    def _look(self, camera: Camera) -> Span:
        camera = camera.clamped(self.grid, self.width, self.height)
        self.camera = camera
        return self._redraw()

    def _regrid(self, grid: Grid) -> None:
        assert self.cells is not None, "only a shown ledger has a grid"
        old, self.grid = self.cells, grid
        self.cells = Cells(old.ledger, grid, old.block_size, self.mode)
        self.cells.has_filled, self.cells.step, self.cells.last_used = old.has_filled, old.step, old.last_used
        self.cells.refresh_all()
        self.cells.select(old.selected if old.has_selection else None)

    def _recolor(self) -> Span:
        self._ink = ink_of(self.mode, self._theme)
        return self._redraw(fresh_ranks=True)

    def _redraw(self, fresh_ranks: bool = False) -> Span:
        if self.cells is None:
            self.pixels.fill(self._ink.background)
            return 0, self.height
        if fresh_ranks:
            self._aged_step = self.cells.step
            self.cells.refresh_all()
        kind = CellRaster if self.camera.pitch >= MIN_CELL_PITCH else DenseRaster
        self._raster = kind(self.cells, self.camera, self.pixels)
        self._raster.draw_all(self._ink)
        return 0, self.height

    def _draw(self, ids: Ids, level: int) -> Span:
        if self._raster is None or not ids.size:
            return None
        if level < FIRST_MOVE_LEVEL and ids.size * _ALL_AT_ONCE > self.grid.num_blocks:
            self._raster.draw_all(self._ink)
            return 0, self.height
        return self._raster.draw(ids, level, self._ink)

    def _draw_lit(self, lit: LitCells) -> Span:
        span: Span = None
        for level, ids in lit:
            span = union(span, self._draw(ids, level))
        return span


def union(first: Span, second: Span) -> Span:
    if first is None or second is None:
        return first or second
    return min(first[0], second[0]), max(first[1], second[1])


# Pure geometry, in device pixels: the largest cell size at which the whole map fits into a window.
def fit(num_blocks: int, width: int, height: int, sizes: tuple[int, ...] = (), heading: int = 0) -> tuple[Grid, Camera]:
    """Return the grid and camera that show all blocks with the largest possible cells in `width` x `height` pixels.

    `sizes`: blocks of each section, () for a single one without heading; `heading`: height of a heading in pixels.
    """
    shape = _Shape(sizes or (num_blocks,), heading_height(len(sizes), height, heading))
    columns, pitch = _whole_pitch(shape, width, height) or _dense_pitch(shape, width, height)
    grid = Grid(num_blocks, columns, sizes, shape.gap_rows(pitch))
    return grid, Camera(pitch, 0.0, 0.0).clamped(grid, width, height)


def heading_height(num_sections: int, height: int, wanted: int) -> int:
    """Return the height of each heading: `wanted`, or that of a bare separator if the headings would take more than
    half of the window."""
    if num_sections < 2:
        return 0
    return wanted if 2 * num_sections * wanted <= height else _BARE_SEPARATOR


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sections and heading height that must fit into a window."""

    sizes: tuple[int, ...]
    heading: int

    @property
    def num_blocks(self) -> int:
        return sum(self.sizes)

    @property
    def widest(self) -> int:
        """Maximum number of useful columns."""
        return max(self.sizes)

    def gap_rows(self, pitch: float) -> int:
        return gap_rows(self.heading, pitch)

    def block_rows(self, columns: int) -> int:
        return sum(-(-size // columns) for size in self.sizes)


def gap_rows(heading: int, pitch: float) -> int:
    """Return the whole rows of `pitch` that a heading takes."""
    return math.ceil(heading / pitch)


def _whole_pitch(shape: _Shape, width: int, height: int) -> tuple[int, float] | None:
    for pitch in range(MAX_FIT_PITCH, MIN_CELL_PITCH - 1, -1):
        most, max_rows = width // pitch, height // pitch - len(shape.sizes) * shape.gap_rows(pitch)
        if max_rows < 1 or most * max_rows < shape.num_blocks:
            continue
        for divisor in _ROUND_COLUMNS:  # prefer rows that start at round block ids if this needs no smaller cells
            columns = most - most % divisor
            if columns and shape.block_rows(columns) <= max_rows:
                return min(columns, shape.widest), float(pitch)
    return None


def _dense_pitch(shape: _Shape, width: int, height: int) -> tuple[int, float]:
    num_blocks = shape.num_blocks
    # Headings are rounded up to whole rows, so each may take up to one pitch more than its height.
    room = max(1, height - len(shape.sizes) * (shape.heading + MIN_CELL_PITCH if shape.heading else 0))
    near = math.sqrt(num_blocks * width / room)
    low, high = max(1, int(near * 0.9)), int(near * 1.1) + 2
    candidates = ((min(width / c, room / shape.block_rows(c)), c) for c in range(low, high))
    pitch, columns = max(candidates)
    return min(columns, shape.widest), min(pitch, float(MIN_CELL_PITCH) - 0.01)
