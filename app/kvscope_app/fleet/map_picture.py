"""Small image of a block pool, with a cell for each bin of blocks."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from PySide6.QtCore import Qt
from PySide6.QtGui import QImage, QPixmap

from kvscope_app.ui.theme import Theme
from kvscope_telemetry.fleet.pool_bins import PoolBins

SIZE: Final = (128, 32)
"""Width and height of the image in device-independent pixels."""
_COLUMNS: Final = 64
_ROWS: Final = 16


def map_pixmap(bins: PoolBins, theme: Theme, ratio: float = 1.0) -> QPixmap:
    """Return an image of `bins`, enlarged to `SIZE` for a screen with device pixel ratio `ratio`."""
    pixels = cells(bins, theme)
    height, width = pixels.shape
    image = QImage(pixels.data, width, height, 4 * width, QImage.Format.Format_ARGB32)
    scaled = image.scaled(
        round(SIZE[0] * ratio), round(SIZE[1] * ratio), Qt.AspectRatioMode.IgnoreAspectRatio,
        Qt.TransformationMode.FastTransformation,
    )  # fmt: skip
    pixmap = QPixmap.fromImage(scaled)
    pixmap.setDevicePixelRatio(ratio)
    return pixmap


def cells(bins: PoolBins, theme: Theme) -> npt.NDArray[np.uint32]:
    """Return the colour of each bin as a pixel 0xAARRGGBB, shape (rows, columns), row-major from the top left.

    Unused cells of the last row are transparent.
    """
    active, cached = (np.frombuffer(data, np.uint8).astype(np.float64) / 255 for data in (bins.active, bins.cached))
    cached = np.minimum(cached, 1 - active)
    free = 1 - active - cached
    names = (theme.block_free, theme.block_active, theme.block_cached)
    colors = np.array([[int(name[at : at + 2], 16) for at in (1, 3, 5)] for name in names], np.float64)
    mixed = np.rint(np.stack((free, active, cached), axis=1) @ colors).astype(np.uint32)
    colors_argb = np.uint32(0xFF000000) | mixed[:, 0] << np.uint32(16) | mixed[:, 1] << np.uint32(8) | mixed[:, 2]
    columns = min(_COLUMNS, max(1, -(-len(bins) // min(_ROWS, max(1, len(bins) // 4)))))
    pixels = np.zeros((-(-len(bins) // columns), columns), np.uint32)
    pixels.flat[: len(bins)] = colors_argb
    return pixels
