"""The block table of one request: a cell a block in table order, its height of ink the slots that are filled.

Few blocks carry their physical id; many are small cells. Hovering tells index, id and fill.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PySide6.QtCore import QEvent, QRect, QSize, Qt
from PySide6.QtGui import QColor, QHelpEvent, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from kvscope_app.look.fonts import sans
from kvscope_app.look.number_text import count
from kvscope_app.look.theme import DARK, Theme, mix
from kvscope_app.views.places import Place, place_of
from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.messages.telemetry import CacheInfo

MAX_NAMED = 96
"""More blocks than this are drawn small and without their ids."""
_NAMED = QSize(52, 26)
_SMALL = QSize(13, 13)
_GAP = 3
_MARGIN = 8

IntArray = npt.NDArray[np.int64]


class BlockStrip(QWidget):
    """Cells that wrap; as tall as they need for the width they get."""

    def __init__(self) -> None:
        super().__init__()
        self._theme: Theme = DARK
        self._ids = np.empty(0, np.int64)
        self._filled = np.empty(0, np.int64)
        self._ref_counts = np.empty(0, np.int64)
        self._block_size = 1
        self._cache: CacheInfo | None = None
        policy = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self.setAccessibleName("Block table")

    def show_blocks(
        self, ids: IntArray, filled: IntArray, ref_counts: IntArray, block_size: int, cache: CacheInfo | None = None
    ) -> None:
        """Blocks in table order, shape (n,) each; `cache` tells which of them are places of a lower tier."""
        is_other_size = ids.size != self._ids.size
        if not is_other_size and np.array_equal(ids, self._ids) and np.array_equal(filled, self._filled):
            return
        self._ids, self._filled, self._ref_counts = ids, filled, ref_counts
        self._block_size = max(block_size, 1)
        self._cache = cache
        self.setAccessibleDescription(f"{count(ids.size)} blocks")
        if is_other_size:
            self.updateGeometry()
        self.update()

    def apply_theme(self, theme: Theme) -> None:
        """Take the colours of the page map."""
        self._theme = theme
        self.update()

    def tip(self, index: int) -> str:
        """What hovering the block at `index` of the table says."""
        shared = int(self._ref_counts[index])
        first = index * self._block_size
        lines = [
            self._place(index).name,
            f"index {index} of the table, positions {count(first)} to {count(first + self._block_size - 1)}",
            f"{self._filled[index]} of {self._block_size} slots filled",
        ]
        return "\n".join([*lines, f"shared by {shared} requests"] if shared > 1 else lines)

    def index_at(self, x: int, y: int) -> int | None:
        """Index in the table of the cell at a place of the widget."""
        cell, per_row = self._cell(), self._per_row(self.width())
        column, inside_x = divmod(x - _MARGIN, cell.width() + _GAP)
        row, inside_y = divmod(y - _MARGIN, cell.height() + _GAP)
        if not 0 <= column < per_row or row < 0 or inside_x >= cell.width() or inside_y >= cell.height():
            return None
        index = row * per_row + column
        return index if index < self._ids.size else None

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        rows = -(-self._ids.size // self._per_row(width))
        return max(rows * (self._cell().height() + _GAP) + 2 * _MARGIN, 24)

    def sizeHint(self) -> QSize:
        return QSize(240, self.heightForWidth(max(self.width(), 240)))

    def minimumSizeHint(self) -> QSize:
        return QSize(_NAMED.width() + 2 * _MARGIN, 24)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setFont(sans(0.85))
        named = self._ids.size <= MAX_NAMED
        for index in range(self._ids.size):
            box = self._box(index)
            if box.intersects(event.rect()):
                self._paint_cell(painter, index, box, named)
        painter.end()

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            index = self.index_at(event.pos().x(), event.pos().y())
            QToolTip.showText(event.globalPos(), "" if index is None else self.tip(index), self)
            return True
        return super().event(event)

    def _paint_cell(self, painter: QPainter, index: int, box: QRect, named: bool) -> None:
        theme = self._theme
        place = self._place(index)
        shared = theme.block_shared if self._ref_counts[index] > 1 else theme.block_active
        ink = {Tier.HOST: theme.block_host, Tier.DISK: theme.block_disk}.get(place.tier, shared)
        painter.fillRect(box, QColor(theme.block_free))
        height = round(box.height() * min(int(self._filled[index]) / self._block_size, 1.0))
        fill = mix(ink, theme.base, 0.45) if named else ink
        painter.fillRect(box.left(), box.bottom() + 1 - height, box.width(), height, QColor(fill))
        if named:
            painter.setPen(QColor(theme.text))
            painter.drawText(box, Qt.AlignmentFlag.AlignCenter, place.short)

    def _place(self, index: int) -> Place:
        row = int(self._ids[index])
        return Place(Tier.HBM, row) if self._cache is None else place_of(self._cache, row)

    def _box(self, index: int) -> QRect:
        cell = self._cell()
        row, column = divmod(index, self._per_row(self.width()))
        left = _MARGIN + column * (cell.width() + _GAP)
        return QRect(left, _MARGIN + row * (cell.height() + _GAP), cell.width(), cell.height())

    def _cell(self) -> QSize:
        return _NAMED if self._ids.size <= MAX_NAMED else _SMALL

    def _per_row(self, width: int) -> int:
        return max((width - 2 * _MARGIN + _GAP) // (self._cell().width() + _GAP), 1)
