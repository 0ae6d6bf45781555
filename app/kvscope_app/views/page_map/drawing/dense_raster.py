"""Pixels of a page map whose cells are smaller than a few pixels: every pixel shows the highest rank under it.

Without that (nearest sampling) single blocks would vanish between pixels. Cost is that of the pixels, and of the
changed blocks afterwards; never that of all blocks.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvscope_app.views.page_map.drawing.cells import Cells, Ids
from kvscope_app.views.page_map.drawing.grid import Camera
from kvscope_app.views.page_map.drawing.ink import Ink, Pixels

Index = npt.NDArray[np.int64]


class _Axis:
    """Pixels of one axis and the cells under each.

    Pixel `first_pixel + i` shows cells `cells[i]` (shape (k,), k >= 1, the last one repeated at the edge); cell `c`
    is shown by `count[c]` pixels from `start[c]` on.
    """

    def __init__(self, num_cells: int, num_pixels: int, pitch: float, offset: float) -> None:
        self.first_pixel = max(0, math.ceil(offset - 0.5))
        end = min(num_pixels, math.ceil(offset + num_cells * pitch - 0.5))
        centers = np.arange(self.first_pixel, max(end, self.first_pixel)) + 0.5 - offset
        reach = max(1, math.ceil(1 / pitch))
        first = np.floor((centers - 0.5 if reach > 1 else centers) / pitch).astype(np.int64)
        self.cells: Index = np.clip(first[:, None] + np.arange(reach), 0, num_cells - 1)
        every = np.arange(num_cells)
        self.start: Index = np.searchsorted(self.cells[:, -1], every, side="left")
        self.count: Index = np.searchsorted(self.cells[:, 0], every, side="right") - self.start
        self.max_count = int(self.count.max(initial=0))

    @property
    def window(self) -> slice:
        """The pixels the axis covers."""
        return slice(self.first_pixel, self.first_pixel + len(self.cells))


class DenseRaster:
    """Draws `cells` through `camera` into `pixels`, shape (height, width)."""

    def __init__(self, cells: Cells, camera: Camera, pixels: Pixels) -> None:
        self._cells = cells
        self._pixels = pixels
        height, width = pixels.shape
        self._x = _Axis(cells.grid.columns, width, camera.pitch, camera.x)
        self._y = _Axis(cells.grid.rows, height, camera.pitch, camera.y)

    def draw_all(self, ink: Ink) -> None:
        """Every pixel anew."""
        self._pixels.fill(ink.background)
        ranks = self._pooled()
        self._pixels[self._y.window, self._x.window] = ink.solid[0, 0][ranks]

    def draw(self, ids: Ids, level: int, ink: Ink) -> tuple[int, int] | None:
        """The pixels of `ids`, shape (n,), at flash `level`. Returns the pixel rows touched, (first, end)."""
        y, x = self._pixels_of(ids)
        if not y.size:
            return None
        ranks = self._ranks_under(y, x)
        self._pixels[y + self._y.first_pixel, x + self._x.first_pixel] = ink.solid[0, level][ranks]
        return int(y.min()) + self._y.first_pixel, int(y.max()) + self._y.first_pixel + 1

    def _pooled(self) -> npt.NDArray[np.uint16]:
        rows, columns = self._y.cells, self._x.cells
        tall = self._cells.table[rows[:, 0]]
        for k in range(1, rows.shape[1]):
            np.maximum(tall, self._cells.table[rows[:, k]], out=tall)
        wide = tall[:, columns[:, 0]]
        for k in range(1, columns.shape[1]):
            np.maximum(wide, tall[:, columns[:, k]], out=wide)
        return wide

    def _pixels_of(self, ids: Ids) -> tuple[Index, Index]:
        """Pixel indices (within each axis) that show any of `ids`; a pixel may occur twice."""
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
