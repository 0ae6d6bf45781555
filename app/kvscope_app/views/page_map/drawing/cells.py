"""Cells of the page map: the rank of every block (see `pixel_tables`), and the pixels of its cell. Uses numpy only.

`Cells` owns the ranks, which follow from the ledger, the colour mode and the selection. `CellRaster` draws cells of at
least a few pixels: a rounded square, solid for the filled share of its slots and hollow for the rest. A dot marks a
block that several requests hold, an outline a block of the selected request, a faint outline a block without memory,
and a glyph the kind of a flash. `DenseRaster` draws smaller cells.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.views.page_map.color_modes import HAS_CONTENT, ColorMode
from kvscope_app.views.page_map.drawing.flash_glyphs import glyph_pixels
from kvscope_app.views.page_map.drawing.flash_kinds import LEVELS, MOVES
from kvscope_app.views.page_map.drawing.grid import Camera, Grid
from kvscope_app.views.page_map.drawing.pixel_tables import Emphasis, Pixels, PixelTables
from kvscope_telemetry.ledger import STATE_TIERS, BlockState, Ledger

Ids = npt.NDArray[np.uint32]
Ranks = npt.NDArray[np.uint16]

_NO_IDS = np.empty(0, np.uint32)


def distinct(ids: Ids) -> Ids:
    """Return the distinct `ids`, ascending. Several times faster than np.unique; called for each frame."""
    ordered = np.sort(ids)
    is_first = np.empty(ids.size, np.bool_)
    is_first[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]


class Cells:
    """Ranks of all cells of `grid`. Cells without a block (ends of sections, headings) have rank 0.

    Reads the ledger without changing it. Call `refresh` for changed blocks, `refresh_all` after any other change.
    """

    def __init__(self, ledger: Ledger, grid: Grid, block_size: int, mode: ColorMode) -> None:
        self.ledger = ledger
        self.grid = grid
        self.block_size = block_size
        self.mode = mode
        self.has_filled = True
        """Whether the engine reports the filled slots of blocks; otherwise cells are drawn as full."""
        self.step = 0
        self.last_used: npt.NDArray[np.uint32] | None = None
        """Step of each block's last use, including reads (`mirror.last_use`), shape (num_blocks,).

        If this is None, the ledger's values are used, which exclude reads.
        """
        self.selected: Ids = _NO_IDS
        self.has_selection = False
        self._ranks: Ranks = np.zeros(grid.num_cells, np.uint16)
        self._emphasis = np.full(grid.num_blocks, Emphasis.NORMAL << 8, np.uint16)

    @property
    def ranks(self) -> Ranks:
        """Ranks in cell order, shape (rows * columns,)."""
        return self._ranks

    def ranks_of(self, ids: Ids) -> Ranks:
        return self._ranks[self.grid.cells_of(ids)]

    @property
    def table(self) -> Ranks:
        """Ranks as a grid, shape (rows, columns)."""
        return self._ranks.reshape(self.grid.rows, self.grid.columns)

    def refresh(self, ids: Ids) -> None:
        """Recompute the ranks of blocks `ids`, shape (n,), from the ledger."""
        keys = self.mode.keys(self._ledger_with_reads(), ids, self.block_size, self.step)
        self._ranks[self.grid.cells_of(ids)] = self._emphasis[ids] | keys

    def refresh_all(self) -> None:
        keys = self.mode.keys(self._ledger_with_reads(), slice(None), self.block_size, self.step)
        for section in self.grid.sections:
            blocks = slice(section.start, section.end)
            cells = slice(section.first_cell, section.first_cell + section.size)
            np.bitwise_or(self._emphasis[blocks], keys[blocks], out=self._ranks[cells])

    def _ledger_with_reads(self) -> Ledger:
        if not self.mode.depends_on_step or self.last_used is None or self.last_used.size != self.ledger.num_blocks:
            return self.ledger
        ledger = self.ledger.part(0, self.ledger.num_blocks)
        ledger.last_used_step = self.last_used
        return ledger

    def select(self, ids: Ids | None) -> Ids:
        """Emphasize blocks `ids` and dim all others; None removes the emphasis. Returns the ids whose rank changed.

        An empty selection dims all blocks: the selected request holds none.
        """
        selected = _NO_IDS if ids is None else np.unique(ids[ids < self.grid.num_blocks])
        if (ids is not None) == self.has_selection:
            changed = np.setxor1d(selected, self.selected, assume_unique=True)
        else:
            changed = np.arange(self.grid.num_blocks, dtype=np.uint32)
        self.has_selection = ids is not None
        self._emphasis[changed] = (Emphasis.DIMMED if self.has_selection else Emphasis.NORMAL) << 8
        self._emphasis[selected] = Emphasis.SELECTED << 8
        self.selected = selected
        if changed.size:
            self.refresh(changed)
        return changed

    def fill_share(self, ids: Ids) -> npt.NDArray[np.float32]:
        """Return the share of each block's slots that contain a token, 0 to 1, in the shape of `ids`.

        The share is 1 for blocks without content and for recurrent states, which are drawn as full cells.
        """
        if not self.has_filled:
            return np.ones(ids.size, np.float32)
        filled = np.minimum(self.ledger.filled[ids].astype(np.float32) / np.float32(self.block_size), 1)
        is_partial = HAS_CONTENT[self.ledger.state[ids]] & ~np.isin(self.ledger.tier[ids], STATE_TIERS)
        return np.where(is_partial, filled, np.float32(1))

    def unmapped(self, ids: Ids) -> npt.NDArray[np.bool_]:
        unmapped: npt.NDArray[np.bool_] = self.ledger.state[ids] == BlockState.UNMAPPED
        return unmapped

    def shared(self, ids: Ids) -> npt.NDArray[np.bool_]:
        return self.ledger.ref_count[ids] > 1


_MIN_PITCH_FOR_FILL: Final = 7
_MIN_PITCH_FOR_CORNERS: Final = 10
_MIN_PITCH_FOR_MARK: Final = 13
_MIN_PITCH_FOR_OUTLINE: Final = 7
_MAX_TILE_PIXELS: Final = 1 << 21
"""Maximum number of cell pixels computed at a time, to limit memory."""
_NO_PIXELS: Final = np.empty(0, np.int64)


class CellShape:
    """Indices of the gap, corner, mark and outline pixels in the flattened `pitch` x `pitch` pixels of one cell."""

    def __init__(self, pitch: int) -> None:
        self.pitch = pitch
        gap = 1 if pitch < 10 else 2 if pitch < 24 else 3 if pitch < 48 else 4
        self.low = gap // 2
        self.high = pitch - (gap - self.low)
        index = np.arange(pitch)
        inside = (index >= self.low) & (index < self.high)
        self.gap = np.flatnonzero(~(inside[:, None] & inside[None, :]))
        self.corners, self.smooth = self._corners()
        self.mark = self._mark()
        self.outline = self._outline()
        self._glyphs = {kind: glyph_pixels(kind, pitch, self.low, self.width) for kind in MOVES}

    @property
    def width(self) -> int:
        return self.high - self.low

    def glyph(self, level: int) -> npt.NDArray[np.int64]:
        return self._glyphs.get(LEVELS[level].kind, _NO_PIXELS)

    def _corners(self) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[np.int64]]]:
        """Return the pixels at the corners of a rounded cell as indices.

        The first array has the pixels that show the background. The list has the pixels that the cell covers by two
        thirds, then those that it covers by one third.
        """
        if self.pitch < _MIN_PITCH_FOR_CORNERS:
            return np.empty(0, np.int64), []
        if self.pitch < 20:
            return self._mirrored([(0, 0)]), []
        cut, two_thirds, one_third = [(0, 0), (0, 1), (1, 0)], [(1, 1), (0, 3), (3, 0)], [(0, 2), (2, 0)]
        return self._mirrored(cut), [self._mirrored(two_thirds), self._mirrored(one_third)]

    def _mirrored(self, pixels: list[tuple[int, int]]) -> npt.NDArray[np.int64]:
        low, last = self.low, self.high - 1
        ys = [(low + y, last - y) for y, _ in pixels]
        xs = [(low + x, last - x) for _, x in pixels]
        flat = {y * self.pitch + x for y2, x2 in zip(ys, xs, strict=True) for y in y2 for x in x2}
        return np.array(sorted(flat), np.int64)

    def _mark(self) -> npt.NDArray[np.int64]:
        if self.pitch < _MIN_PITCH_FOR_MARK:
            return np.empty(0, np.int64)
        size, inset = max(2, self.pitch // 7), max(2, self.pitch // 8)
        ys = np.arange(self.low + inset, self.low + inset + size)
        xs = np.arange(self.high - inset - size, self.high - inset)
        return (ys[:, None] * self.pitch + xs[None, :]).ravel()

    def _outline(self) -> npt.NDArray[np.int64]:
        if self.pitch < _MIN_PITCH_FOR_OUTLINE:
            return np.empty(0, np.int64)
        thickness = 1 if self.pitch < 24 else 2
        index = np.arange(self.pitch)
        is_inside = (index >= self.low) & (index < self.high)
        is_interior = (index >= self.low + thickness) & (index < self.high - thickness)
        is_border = (is_inside[:, None] & is_inside[None, :]) & ~(is_interior[:, None] & is_interior[None, :])
        return np.setdiff1d(np.flatnonzero(is_border), self.corners)


class CellRaster:
    """Draws `cells` through `camera` (whose pitch and offset must be integral) into `pixels`, shape (height, width)."""

    def __init__(self, cells: Cells, camera: Camera, pixels: Pixels) -> None:
        self._cells = cells
        self._pixels = pixels
        self._shape = CellShape(round(camera.pitch))
        self._x, self._y = round(camera.x), round(camera.y)
        height, width = pixels.shape
        pitch, grid = self._shape.pitch, cells.grid
        self._rows = range(max(0, -self._y // pitch), min(grid.rows, -((self._y - height) // pitch)))
        self._columns = range(max(0, -self._x // pitch), min(grid.columns, -((self._x - width) // pitch)))

    def draw_all(self, tables: PixelTables) -> None:
        self._pixels.fill(tables.background)
        if not (self._rows and self._columns):
            return
        rows_at_once = max(1, _MAX_TILE_PIXELS // (len(self._columns) * self._shape.pitch**2))
        for start in range(self._rows.start, self._rows.stop, rows_at_once):
            self._draw_rows(range(start, min(start + rows_at_once, self._rows.stop)), tables)

    def draw(self, ids: Ids, level: int, tables: PixelTables) -> tuple[int, int] | None:
        """Draw the cells of `ids`, shape (n,), at flash `level`.

        Returns the pixel rows touched, (first, end), or None if no cell is visible.
        """
        row, column = np.divmod(self._cells.grid.cells_of(ids), self._cells.grid.columns)
        shown = (row >= self._rows.start) & (row < self._rows.stop)
        shown &= (column >= self._columns.start) & (column < self._columns.stop)
        if not shown.any():
            return None
        row, column = row[shown], column[shown]
        tiles = self._tiles(ids[shown], level, tables)
        self._scatter(tiles, row * self._shape.pitch + self._y, column * self._shape.pitch + self._x)
        return self._row_span(int(row.min()), int(row.max()))

    def _draw_rows(self, rows: range, tables: PixelTables) -> None:
        grid, pitch = self._cells.grid, self._shape.pitch
        row_ids = np.arange(rows.start, rows.stop)[:, None] * grid.columns
        ids = grid.blocks_of((row_ids + np.arange(self._columns.start, self._columns.stop)).ravel())
        tiles = self._tiles(np.maximum(ids, 0).astype(np.uint32), 0, tables)
        tiles[ids < 0] = tables.background
        shape = (len(rows), len(self._columns), pitch, pitch)
        band = tiles.reshape(shape).transpose(0, 2, 1, 3).reshape(shape[0] * pitch, shape[1] * pitch)
        self._blit(band, rows.start * pitch + self._y, self._columns.start * pitch + self._x)

    def _blit(self, band: Pixels, top: int, left: int) -> None:
        height, width = self._pixels.shape
        bottom, right = min(height, top + band.shape[0]), min(width, left + band.shape[1])
        self._pixels[max(0, top) : bottom, max(0, left) : right] = band[
            max(0, -top) : bottom - top, max(0, -left) : right - left
        ]

    def _scatter(self, tiles: Pixels, tops: npt.NDArray[np.int64], lefts: npt.NDArray[np.int64]) -> None:
        height, width = self._pixels.shape
        index = np.arange(self._shape.pitch)
        ys, xs = tops[:, None] + index, lefts[:, None] + index
        if ys.min() >= 0 and xs.min() >= 0 and ys.max() < height and xs.max() < width:
            self._pixels[ys[:, :, None], xs[:, None, :]] = tiles
            return
        shown = ((ys >= 0) & (ys < height))[:, :, None] & ((xs >= 0) & (xs < width))[:, None, :]
        flat = ys[:, :, None] * width + xs[:, None, :]
        self._pixels.reshape(-1)[flat[shown]] = tiles[shown]

    def _row_span(self, first_row: int, last_row: int) -> tuple[int, int]:
        pitch = self._shape.pitch
        return max(0, first_row * pitch + self._y), min(len(self._pixels), (last_row + 1) * pitch + self._y)

    def _tiles(self, ids: Ids, level: int, tables: PixelTables) -> Pixels:
        """Return the pixels of each block's cell, shape (n, pitch, pitch)."""
        shape, ranks = self._shape, self._cells.ranks_of(ids)
        rows = self._row_pattern(ids, ranks, 0, level, tables)
        tiles = np.repeat(rows[:, None, :], shape.pitch, axis=1)
        flat = tiles.reshape(len(ids), -1)
        for coverage, indices in enumerate(shape.smooth, start=1):
            blended = self._row_pattern(ids, ranks, coverage, level, tables)
            flat[:, indices] = blended[:, indices % shape.pitch]
        flat[:, shape.gap] = tables.background
        flat[:, shape.corners] = tables.background
        self._decorate(flat, ids, ranks, tables)
        glyph = shape.glyph(level)
        if glyph.size:
            flat[:, glyph] = tables.glyphs[LEVELS[level].kind]
        return tiles

    def _row_pattern(
        self, ids: Ids, ranks: npt.NDArray[np.uint16], coverage: int, level: int, tables: PixelTables
    ) -> Pixels:
        shape = self._shape
        solid = tables.solid[coverage, level][ranks][:, None]
        if shape.pitch < _MIN_PITCH_FOR_FILL:
            return np.repeat(solid, shape.pitch, axis=1)
        hollow = tables.hollow[coverage, level][ranks][:, None]
        share = self._cells.fill_share(ids)
        end = shape.low + np.where(share > 0, np.maximum(1, np.rint(share * shape.width)), 0)
        pattern: Pixels = np.where(np.arange(shape.pitch) < end[:, None], solid, hollow)
        return pattern

    def _decorate(self, flat: Pixels, ids: Ids, ranks: npt.NDArray[np.uint16], tables: PixelTables) -> None:
        if self._shape.mark.size:
            shared = np.flatnonzero(self._cells.shared(ids) & (ranks >> 8 != Emphasis.DIMMED))
            flat[shared[:, None], self._shape.mark] = tables.mark
        if self._shape.outline.size:
            unmapped = np.flatnonzero(self._cells.unmapped(ids))
            flat[unmapped[:, None], self._shape.outline] = tables.empty_outline
        selected = np.flatnonzero(ranks >> 8 == Emphasis.SELECTED)
        if selected.size and self._shape.outline.size:
            flat[selected[:, None], self._shape.outline] = tables.outline


Index = npt.NDArray[np.int64]


class _Axis:
    """Mapping between pixels and cells along one axis.

    Pixel `first_pixel + i` shows cells `cells[i]`, shape (k,) with k >= 1; the last cell is repeated at the edge. Cell
    `c` covers `count[c]` pixels from `start[c]`.
    """

    def __init__(self, num_cells: int, num_pixels: int, pitch: float, offset: float) -> None:
        self.first_pixel = max(0, math.ceil(offset - 0.5))
        end = min(num_pixels, math.ceil(offset + num_cells * pitch - 0.5))
        centers = np.arange(self.first_pixel, max(end, self.first_pixel)) + 0.5 - offset
        reach = max(1, math.ceil(1 / pitch))
        first = np.floor((centers - 0.5 if reach > 1 else centers) / pitch).astype(np.int64)
        self.cells: Index = np.clip(first[:, None] + np.arange(reach), 0, num_cells - 1)
        all_cells = np.arange(num_cells)
        self.start: Index = np.searchsorted(self.cells[:, -1], all_cells, side="left")
        self.count: Index = np.searchsorted(self.cells[:, 0], all_cells, side="right") - self.start
        self.max_count = int(self.count.max(initial=0))

    @property
    def window(self) -> slice:
        return slice(self.first_pixel, self.first_pixel + len(self.cells))


class DenseRaster:
    """Draws `cells` through `camera` into `pixels`, shape (height, width). Each pixel shows the highest rank of its
    cells.

    With nearest sampling, single blocks would vanish between pixels. `draw_all` takes time proportional to the number
    of pixels, `draw` to the number of changed blocks.
    """

    def __init__(self, cells: Cells, camera: Camera, pixels: Pixels) -> None:
        self._cells = cells
        self._pixels = pixels
        height, width = pixels.shape
        self._x = _Axis(cells.grid.columns, width, camera.pitch, camera.x)
        self._y = _Axis(cells.grid.rows, height, camera.pitch, camera.y)

    def draw_all(self, tables: PixelTables) -> None:
        self._pixels.fill(tables.background)
        ranks = self._max_pooled()
        self._pixels[self._y.window, self._x.window] = tables.solid[0, 0][ranks]

    def draw(self, ids: Ids, level: int, tables: PixelTables) -> tuple[int, int] | None:
        """Draw the pixels of `ids`, shape (n,), at flash `level`.

        Returns the pixel rows touched, (first, end), or None if no block is visible.
        """
        y, x = self._pixels_of(ids)
        if not y.size:
            return None
        ranks = self._ranks_under(y, x)
        self._pixels[y + self._y.first_pixel, x + self._x.first_pixel] = tables.solid[0, level][ranks]
        return int(y.min()) + self._y.first_pixel, int(y.max()) + self._y.first_pixel + 1

    def _max_pooled(self) -> npt.NDArray[np.uint16]:
        rows, columns = self._y.cells, self._x.cells
        tall = self._cells.table[rows[:, 0]]
        for k in range(1, rows.shape[1]):
            np.maximum(tall, self._cells.table[rows[:, k]], out=tall)
        wide = tall[:, columns[:, 0]]
        for k in range(1, columns.shape[1]):
            np.maximum(wide, tall[:, columns[:, k]], out=wide)
        return wide

    def _pixels_of(self, ids: Ids) -> tuple[Index, Index]:
        """Return (y, x) of the pixels that show any of `ids`, relative to each axis's first pixel. A pixel may occur
        twice.
        """
        row, column = np.divmod(self._cells.grid.cells_of(ids), self._cells.grid.columns)
        ys, xs = [], []
        for dy in range(self._y.max_count):
            for dx in range(self._x.max_count):
                shown = (dy < self._y.count[row]) & (dx < self._x.count[column])
                ys.append((self._y.start[row] + dy)[shown])
                xs.append((self._x.start[column] + dx)[shown])
        if not ys:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate(ys), np.concatenate(xs)

    def _ranks_under(self, y: Index, x: Index) -> npt.NDArray[np.uint16]:
        base = self._cells.grid.columns
        result = np.zeros(y.size, np.uint16)
        for ky in range(self._y.cells.shape[1]):
            start = self._y.cells[y, ky] * base
            for kx in range(self._x.cells.shape[1]):
                np.maximum(result, self._cells.ranks[start + self._x.cells[x, kx]], out=result)
        return result
