"""Drawing of the page map without a window: blocks, camera, and pixels. Uses numpy only.

Owns the user's choices (mode, camera, selection). Every method that changes pixels returns the span of pixel rows
(first, end) to repaint, or None.
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
from kvscope_app.views.page_map.drawing.pixel_tables import Pixels, cached_tables
from kvscope_telemetry.ledger import Ledger

MAX_FIT_PITCH: Final = 48
_ROUND_COLUMNS: Final = (16, 8, 4, 2, 1)
_SEPARATOR_HEIGHT: Final = 2
"""Height in pixels of the gap between sections in a window too small for headings."""
Span = tuple[int, int] | None

_FULL_REDRAW_DIVISOR: Final = 4
"""If more than one block in this many changed, a full redraw is faster than drawing the changed blocks."""


class Scene:
    """Draws the blocks of a pool through a camera into `pixels`, shape (height, width).

    The state of the blocks is in a `Ledger`, which has one row per block.
    """

    def __init__(self) -> None:
        self.pixels: Pixels = np.zeros((1, 1), np.uint32)
        self.mode = STATE
        self.is_flashing = True
        self.has_filled = True
        """Whether the ledger contains each block's number of filled slots. A change takes effect with the next
        `set_ledger`.
        """
        self.has_addresses = True
        """Whether block numbers are memory addresses. Otherwise they have no meaning, and the row numbers at the left
        edge are hidden.
        """
        self.is_fitted = True
        self.grid = Grid(1, 1)
        self.camera = Camera(1.0, 0.0, 0.0)
        self.cells: Cells | None = None
        self._theme = DARK
        self._tables = cached_tables(self.mode, self._theme)
        self._raster: CellRaster | DenseRaster | None = None
        self._flashes = Flashes(0)
        self._sizes: tuple[int, ...] = ()
        self._full_heading_height = 0
        self._last_used: npt.NDArray[np.uint32] | None = None
        self._aged_step = 0

    @property
    def height(self) -> int:
        return len(self.pixels)

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])

    @property
    def is_fading(self) -> bool:
        """Whether flashes are active, so that `fade` must be called."""
        return self._flashes.is_active

    def set_ledger(self, ledger: Ledger, block_size: int, step: int, sizes: tuple[int, ...] = ()) -> Span:
        """Switch to `ledger`. The camera stays if the number of blocks and the sections stay the same.

        `sizes` has the number of blocks in each tier, and is empty for one section without a heading.
        """
        selected = self.cells.selected if self.cells is not None and self.cells.has_selection else None
        has_same_size = self.cells is not None and self.grid.num_blocks == ledger.num_blocks and self._sizes == sizes
        if not has_same_size:
            self._sizes = sizes
            self.is_fitted = True
            self.grid, self.camera = self._fitted(ledger.num_blocks)
            self._flashes = Flashes(ledger.num_blocks)
        self.cells = Cells(ledger, self.grid, block_size, self.mode)
        self.cells.has_filled = self.has_filled
        self.cells.step, self.cells.last_used = step, self._last_used
        self._flashes.clear()
        self.cells.select(selected)
        return self._redraw(fresh_ranks=True)

    @property
    def heading_height(self) -> int:
        return heading_height(len(self._sizes), self.height, self._full_heading_height)

    def resize(self, width: int, height: int, heading: int = 0) -> Span:
        """Replace the pixel buffer by one of `width` x `height` pixels.

        If all blocks were fitted into the old size, they are fitted into the new one. Otherwise the centre of the view
        stays. `heading` is the height of a section's heading, in pixels.
        """
        if (height, width) == self.pixels.shape and heading == self._full_heading_height:
            return None
        self._full_heading_height = heading
        dx, dy = (width - self.width) / 2, (height - self.height) / 2
        self.pixels = np.zeros((max(1, height), max(1, width)), np.uint32)
        if self.is_fitted:
            return self.fit_all()
        return self._set_camera(Camera(self.camera.pitch, self.camera.x + dx, self.camera.y + dy))

    def set_theme(self, theme: Theme) -> Span:
        self._theme = theme
        return self._update_colors()

    def set_mode(self, mode: ColorMode) -> Span:
        """Switch the colour mode and end all flashes."""
        self.mode = mode
        if self.cells is not None:
            self.cells.mode = mode
        self._flashes.clear()
        return self._update_colors()

    def select(self, ids: Ids | None) -> Span:
        """Emphasize blocks `ids` and dim all others; None removes the emphasis."""
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
        return self._draw_lit(self._flashes.change(ids, now_ns) if self.is_flashing else [(0, ids)])

    def flash(self, kind: FlashKind, ids: Ids, now_ns: int) -> Span:
        """Flash blocks `ids` (oldest first) for the move `kind`."""
        if self.cells is None or not self.is_flashing:
            return None
        return self._draw_lit(self._flashes.move(kind, ids[ids < self.grid.num_blocks], now_ns))

    def fade(self, now_ns: int) -> Span:
        return self._draw_lit(self._flashes.fade(now_ns))

    def set_last_used(self, last_used: npt.NDArray[np.uint32]) -> None:
        """Set the step of each block's last use, reads included, shape (num_blocks,); used from the next draw on."""
        self._last_used = last_used
        if self.cells is not None:
            self.cells.last_used = last_used

    def redraw_ages(self, step: int) -> Span:
        if self.cells is None or not self.mode.depends_on_step or self._aged_step == step:
            return None
        self.cells.step = step
        return self._redraw(fresh_ranks=True)

    def fit_all(self) -> Span:
        self.is_fitted = True
        if self.cells is None:
            return self._redraw()
        grid, camera = self._fitted(self.grid.num_blocks)
        if grid != self.grid:
            self._set_grid(grid)
        return self._set_camera(camera)

    def zoom(self, factor: float, px: float, py: float) -> Span:
        """Zoom by `factor` around pixel (px, py). Zooming out stops when all blocks are visible."""
        min_pitch = min(self.width / self.grid.columns, self.height / self.grid.rows)
        camera = self.camera.zoomed(factor, px, py, min(min_pitch, self.camera.pitch) if factor > 1 else min_pitch)
        if factor < 1 and camera.pitch <= min_pitch:
            return self.fit_all()
        self.is_fitted = False
        return self._set_camera(self._with_slim_headings(camera, py))

    def pan(self, dx: float, dy: float) -> Span:
        return self._set_camera(Camera(self.camera.pitch, self.camera.x + dx, self.camera.y + dy))

    def reveal(self, block: int) -> Span:
        """Pan as little as necessary to show `block`."""
        x, y = self.camera.corner_of(*self.grid.position_of(block))
        pitch = self.camera.pitch
        dx = max(0.0, -x) or min(0.0, self.width - pitch - x)
        dy = max(0.0, -y) or min(0.0, self.height - pitch - y)
        return self.pan(dx, dy) if dx or dy else None

    def block_at(self, px: float, py: float) -> int | None:
        return self.grid.block_at(*self.camera.cell_at(px, py)) if self.cells is not None else None

    def _fitted(self, num_blocks: int) -> tuple[Grid, Camera]:
        return fit(num_blocks, self.width, self.height, self._sizes, self._full_heading_height)

    def _with_slim_headings(self, camera: Camera, py: float) -> Camera:
        """Set the number of grid rows per heading to suit the pitch of `camera`, and return the camera that keeps the
        cells at `py` in place.

        Headings have a fixed height in pixels, so they cover fewer rows of larger cells.
        """
        gap = gap_rows(self.heading_height, camera.pitch)
        if gap == self.grid.gap_rows:
            return camera
        row, _ = camera.cell_at(0, py)
        num_above = sum(section.first_row <= row for section in self.grid.sections)
        moved = num_above * (self.grid.gap_rows - gap) * camera.pitch
        self._set_grid(replace(self.grid, gap_rows=gap))
        return replace(camera, y=camera.y + moved)

    def _set_camera(self, camera: Camera) -> Span:
        camera = camera.clamped(self.grid, self.width, self.height)
        self.camera = camera
        return self._redraw()

    def _set_grid(self, grid: Grid) -> None:
        assert self.cells is not None, "only a shown ledger has a grid"
        old_cells, self.grid = self.cells, grid
        self.cells = Cells(old_cells.ledger, grid, old_cells.block_size, self.mode)
        self.cells.has_filled, self.cells.step = old_cells.has_filled, old_cells.step
        self.cells.last_used = old_cells.last_used
        self.cells.refresh_all()
        self.cells.select(old_cells.selected if old_cells.has_selection else None)

    def _update_colors(self) -> Span:
        self._tables = cached_tables(self.mode, self._theme)
        return self._redraw(fresh_ranks=True)

    def _redraw(self, fresh_ranks: bool = False) -> Span:
        if self.cells is None:
            self.pixels.fill(self._tables.background)
            return 0, self.height
        if fresh_ranks:
            self._aged_step = self.cells.step
            self.cells.refresh_all()
        kind = CellRaster if self.camera.pitch >= MIN_CELL_PITCH else DenseRaster
        self._raster = kind(self.cells, self.camera, self.pixels)
        self._raster.draw_all(self._tables)
        return 0, self.height

    def _draw(self, ids: Ids, level: int) -> Span:
        if self._raster is None or not ids.size:
            return None
        if level < FIRST_MOVE_LEVEL and ids.size * _FULL_REDRAW_DIVISOR > self.grid.num_blocks:
            self._raster.draw_all(self._tables)
            return 0, self.height
        return self._raster.draw(ids, level, self._tables)

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

    `sizes` has the number of blocks in each section, and is empty for one section without a heading. `heading` is the
    height of a heading in pixels.
    """
    shape = _Shape(sizes or (num_blocks,), heading_height(len(sizes), height, heading))
    columns, pitch = _integral_pitch(shape, width, height) or _dense_pitch(shape, width, height)
    grid = Grid(num_blocks, columns, sizes, shape.gap_rows(pitch))
    return grid, Camera(pitch, 0.0, 0.0).clamped(grid, width, height)


def heading_height(num_sections: int, height: int, full_height: int) -> int:
    """Return the height of each heading: `full_height`, or `_SEPARATOR_HEIGHT` if headings would take over half of
    `height`. 0 if there is a single section.
    """
    if num_sections < 2:
        return 0
    return full_height if 2 * num_sections * full_height <= height else _SEPARATOR_HEIGHT


@dataclass(frozen=True, slots=True)
class _Shape:
    sizes: tuple[int, ...]
    heading: int

    @property
    def num_blocks(self) -> int:
        return sum(self.sizes)

    @property
    def widest(self) -> int:
        """Maximum useful number of columns, above which the number of rows no longer decreases."""
        return max(self.sizes)

    def gap_rows(self, pitch: float) -> int:
        return gap_rows(self.heading, pitch)

    def block_rows(self, columns: int) -> int:
        return sum(-(-size // columns) for size in self.sizes)


def gap_rows(heading: int, pitch: float) -> int:
    return math.ceil(heading / pitch)


def _integral_pitch(shape: _Shape, width: int, height: int) -> tuple[int, float] | None:
    for pitch in range(MAX_FIT_PITCH, MIN_CELL_PITCH - 1, -1):
        max_columns, max_rows = width // pitch, height // pitch - len(shape.sizes) * shape.gap_rows(pitch)
        if max_rows < 1 or max_columns * max_rows < shape.num_blocks:
            continue
        for divisor in _ROUND_COLUMNS:  # prefer rows that start at round block ids if this needs no smaller cells
            columns = max_columns - max_columns % divisor
            if columns and shape.block_rows(columns) <= max_rows:
                return min(columns, shape.widest), float(pitch)
    return None


def _dense_pitch(shape: _Shape, width: int, height: int) -> tuple[int, float]:
    num_blocks = shape.num_blocks
    # Headings are rounded up to whole rows, so each may take up to one pitch more than its height.
    block_height = max(1, height - len(shape.sizes) * (shape.heading + MIN_CELL_PITCH if shape.heading else 0))
    estimate = math.sqrt(num_blocks * width / block_height)
    low, high = max(1, int(estimate * 0.9)), int(estimate * 1.1) + 2
    candidates = ((min(width / c, block_height / shape.block_rows(c)), c) for c in range(low, high))
    pitch, columns = max(candidates)
    return min(columns, shape.widest), min(pitch, float(MIN_CELL_PITCH) - 0.01)
