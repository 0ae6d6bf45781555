"""The page map without a window: blocks, camera and pixels, and which pixel rows changed. numpy alone.

Owns what the person chose (mode, camera, selection). Every method that changes pixels returns the span of pixel
rows (first, end) it touched, or None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.look.theme import DARK, Theme
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
"""Pixels between sections of a window with no room for headings."""
Span = tuple[int, int] | None

_ALL_AT_ONCE: Final = 4
"""When more than one block in so many changed, everything is drawn anew: it is cheaper."""


class Scene:
    """A ledger seen through a camera, as `pixels` of shape (height, width)."""

    def __init__(self) -> None:
        self.pixels: Pixels = np.zeros((1, 1), np.uint32)
        self.mode = STATE
        self.flashing = True
        self.has_filled = True
        """Whether the ledger says how full blocks are; for what is shown next."""
        self.tells_addresses = True
        """Whether rows are places in memory: otherwise their numbers say nothing at the left edge."""
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
        """Step as of which all ages are drawn."""

    @property
    def height(self) -> int:
        """Pixel rows."""
        return len(self.pixels)

    @property
    def width(self) -> int:
        """Pixel columns."""
        return int(self.pixels.shape[1])

    @property
    def is_fading(self) -> bool:
        """Whether `fade` has something to do later."""
        return self._flashes.active

    def show(self, ledger: Ledger, block_size: int, step: int, sizes: tuple[int, ...] = ()) -> Span:
        """Show this ledger from now on; the camera stays when the number of blocks does.

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
        """Pixels of a section's heading, 0 when there are none."""
        return heading_height(len(self._sizes), self.height, self._wanted_heading)

    def resize(self, width: int, height: int, heading: int = 0) -> Span:
        """New pixels; refits if everything was shown, otherwise keeps what is at the centre there.

        `heading`: pixels that the heading of a section needs.
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
        """Paint in the colours of `theme`."""
        self._theme = theme
        return self._recolor()

    def set_mode(self, mode: ColorMode) -> Span:
        """Let colours say something else."""
        self.mode = mode
        if self.cells is not None:
            self.cells.mode = mode
        self._flashes.clear()
        return self._recolor()

    def select(self, ids: Ids | None) -> Span:
        """Let these blocks stand out; None ends that."""
        if self.cells is None:
            return None
        changed = self.cells.select(ids)
        return self._draw(changed, 0) if changed.size else None

    def change(self, ids: Ids, step: int, now_ns: int) -> Span:
        """Blocks `ids` (unique, shape (n,)) changed in the ledger."""
        if self.cells is None or not ids.size:
            return None
        self.cells.step = step
        self.cells.refresh(ids)
        return self._draw_lit(self._flashes.change(ids, now_ns) if self.flashing else [(0, ids)])

    def flash(self, kind: FlashKind, ids: Ids, now_ns: int) -> Span:
        """Blocks `ids` (oldest first) went through `kind` a moment ago."""
        if self.cells is None or not self.flashing:
            return None
        return self._draw_lit(self._flashes.move(kind, ids[ids < self.grid.num_blocks], now_ns))

    def fade(self, now_ns: int) -> Span:
        """Draw the flashes that went down by now."""
        return self._draw_lit(self._flashes.fade(now_ns))

    def set_last_used(self, last_used: npt.NDArray[np.uint32]) -> None:
        """Tell when each block was last used, reads included, shape (num_blocks,); for what is drawn next."""
        self._last_used = last_used
        if self.cells is not None:
            self.cells.last_used = last_used

    def grow_older(self, step: int) -> Span:
        """Draw ages as of `step`, when colours say how long ago something was."""
        if self.cells is None or not self.mode.by_step or self._aged_step == step:
            return None
        self.cells.step = step
        return self._redraw(fresh_ranks=True)

    def fit_all(self) -> Span:
        """Show every block."""
        self.is_fitted = True
        if self.cells is None:
            return self._redraw()
        grid, camera = self._fit(self.grid.num_blocks)
        if grid != self.grid:
            self._regrid(grid)
        return self._look(camera)

    def zoom(self, factor: float, px: float, py: float) -> Span:
        """Closer (factor above 1) or farther, around pixel (px, py); as far as showing everything."""
        least = min(self.width / self.grid.columns, self.height / self.grid.rows)
        camera = self.camera.zoomed(factor, px, py, min(least, self.camera.pitch) if factor > 1 else least)
        if factor < 1 and camera.pitch <= least:
            return self.fit_all()
        self.is_fitted = False
        return self._look(self._with_slim_headings(camera, py))

    def pan(self, dx: float, dy: float) -> Span:
        """Move the grid by pixels, as far as it reaches."""
        return self._look(Camera(self.camera.pitch, self.camera.x + dx, self.camera.y + dy))

    def reveal(self, block: int) -> Span:
        """Pan just so far that `block` is in the window."""
        x, y = self.camera.corner_of(*self.grid.place_of(block))
        pitch = self.camera.pitch
        dx = max(0.0, -x) or min(0.0, self.width - pitch - x)
        dy = max(0.0, -y) or min(0.0, self.height - pitch - y)
        return self.pan(dx, dy) if dx or dy else None

    def block_at(self, px: float, py: float) -> int | None:
        """The block under a pixel."""
        return self.grid.block_at(*self.camera.cell_at(px, py)) if self.cells is not None else None

    def _fit(self, num_blocks: int) -> tuple[Grid, Camera]:
        return fit(num_blocks, self.width, self.height, self._sizes, self._wanted_heading)

    def _with_slim_headings(self, camera: Camera, py: float) -> Camera:
        """Headings keep their height in pixels, so take fewer rows of larger cells; what is at `py` stays there."""
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
    """The span that covers both."""
    if first is None or second is None:
        return first or second
    return min(first[0], second[0]), max(first[1], second[1])


# How large the cells of a map can be so that all of it is in a window: pure geometry, in device pixels.
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
