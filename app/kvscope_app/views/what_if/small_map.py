"""A policy's memory as a few thousand cells in the order of addresses: one small image, scaled to the widget."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt
from PySide6.QtCore import QSize
from PySide6.QtGui import QImage, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from kvscope_app.look.theme import DARK, Theme
from kvscope_app.views.what_if.words import map_colors
from kvscope_telemetry.messages.what_if import MapKind

HEIGHT: Final = 54
BESIDE_HEIGHT: Final = 72
"""Of a map that stands beside its words."""


class SmallMap(QWidget):
    """Rows from the top, each from the left."""

    def __init__(self) -> None:
        super().__init__()
        self._cells: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._ink: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setFixedHeight(HEIGHT)
        self.apply_theme(DARK)

    def show_cells(self, cells: bytes) -> None:
        """A `MapKind` each; kinds of a later version are shown as free."""
        kinds = np.frombuffer(cells, np.uint8)
        if not np.array_equal(kinds, self._cells):
            self._cells = np.where(kinds < len(MapKind), kinds, np.uint8(MapKind.FREE))
            self.update()

    def apply_theme(self, theme: Theme) -> None:
        """Take the colours of `theme`."""
        colors = map_colors(theme)
        names = [*(colors[kind] for kind in MapKind), theme.panel]
        self._ink = np.array([0xFF000000 | int(color[1:], 16) for color in names], np.uint32)
        self.update()

    def minimumSizeHint(self) -> QSize:
        return QSize(60, self.minimumHeight())

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        pixels = self.pixels()
        image = QImage(pixels.data, pixels.shape[1], pixels.shape[0], 4 * pixels.shape[1], QImage.Format.Format_RGB32)
        painter.drawImage(self.rect(), image)
        painter.end()

    def pixels(self) -> npt.NDArray[np.uint32]:
        """A pixel a cell, shape (rows, columns): about as wide as high on the widget. The rest of the last row is
        the background."""
        num_cells = max(1, self._cells.size)
        columns = max(1, round(math.sqrt(num_cells * self.width() / self.height())))
        columns = min(columns, num_cells)
        kinds = np.full((-(-num_cells // columns), columns), len(MapKind), np.uint8)
        kinds.flat[: self._cells.size] = self._cells
        return self._ink[kinds]
