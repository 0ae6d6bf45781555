"""Strip with the block table of one request: one cell per block in table order, filled in proportion to its filled
slots.

A few blocks are drawn with their physical id, many as small cells. The tooltip of a cell has index, id and fill.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PySide6.QtCore import QEvent, QRect, QSize, Qt
from PySide6.QtGui import QColor, QHelpEvent, QImage, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from kvscope_app.ui.fonts import sans
from kvscope_app.ui.number_text import count
from kvscope_app.ui.theme import DARK, Theme, mix
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.block_locations import BlockLocation, locate_block
from kvscope_app.views.tier_style import tier_color
from kvscope_telemetry.ledger import LOWER_TIERS, Tier
from kvscope_telemetry.messages.telemetry import CacheInfo

MAX_NAMED = 96
"""Maximum number of blocks drawn with their ids; more are drawn as small cells."""
_NAMED_CELL = QSize(52, 26)
_SMALL_CELL = QSize(13, 13)
_GAP = 3
_MARGIN = 8

IntArray = npt.NDArray[np.int64]
Pixels = npt.NDArray[np.uint32]


def _named_cell_size() -> QSize:
    return _NAMED_CELL * (scaled(100) / 100)


class BlockStrip(QWidget):
    """Strip of block cells, wrapped into lines. The widget's height follows from its width."""

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
        """Show blocks in table order; the arrays have shape (n,). `cache` is needed to recognize lower-tier slots."""
        has_other_size = ids.size != self._ids.size
        previous = (self._ids, self._filled, self._ref_counts)
        if all(np.array_equal(*pair) for pair in zip((ids, filled, ref_counts), previous, strict=True)):
            return
        self._ids, self._filled, self._ref_counts = ids, filled, ref_counts
        self._block_size = max(block_size, 1)
        self._cache = cache
        self.setAccessibleDescription(f"{count(ids.size)} blocks")
        if has_other_size:
            self.updateGeometry()
        self.update()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self.update()

    def tip(self, index: int) -> str:
        num_holders = int(self._ref_counts[index])
        first = index * self._block_size
        position_text = f"index {index} of the table, positions {count(first)} to {count(first + self._block_size - 1)}"
        if self._is_released(index):
            return f"Released: no block\n{position_text}"
        lines = [self._location(index).name, position_text, f"{self._filled[index]} of {self._block_size} slots filled"]
        return "\n".join([*lines, f"shared by {num_holders} requests"] if num_holders > 1 else lines)

    def index_at(self, x: int, y: int) -> int | None:
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
        return QSize(_named_cell_size().width() + 2 * _MARGIN, 24)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        if self._ids.size <= MAX_NAMED:
            painter.setFont(sans(0.85))
            for index in range(self._ids.size):
                self._paint_named(painter, index)
        else:
            self._paint_rows(painter, event.rect())
        painter.end()

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            index = self.index_at(event.pos().x(), event.pos().y())
            QToolTip.showText(event.globalPos(), "" if index is None else self.tip(index), self)
            return True
        return super().event(event)

    def _paint_named(self, painter: QPainter, index: int) -> None:
        theme, box = self._theme, self.cell_rect(index)
        location = self._location(index)
        active_color = theme.block_shared if self._ref_counts[index] > 1 else theme.block_active
        color = tier_color(location.tier, theme) if location.tier in LOWER_TIERS else active_color
        painter.fillRect(box, QColor(theme.block_free))
        height = round(box.height() * min(int(self._filled[index]) / self._block_size, 1.0))
        fill = mix(color, theme.base, 0.45)
        painter.fillRect(box.left(), box.bottom() + 1 - height, box.width(), height, QColor(fill))
        painter.setPen(QColor(theme.text))
        painter.drawText(box, Qt.AlignmentFlag.AlignCenter, "–" if self._is_released(index) else location.short)

    def _paint_rows(self, painter: QPainter, dirty: QRect) -> None:
        """Paint the visible small cells as one image, which takes time proportional to the pixels, not to the
        blocks.
        """
        per_row, pitch = self._per_row(self.width()), _SMALL_CELL.height() + _GAP
        first = max((dirty.top() - _MARGIN) // pitch, 0)
        last = max((dirty.bottom() - _MARGIN) // pitch + 1, first)
        blocks = slice(first * per_row, last * per_row)
        if not self._ids[blocks].size:
            return
        empty = QColor(self._theme.block_free).rgba()
        pixels = small_cells(self._fill_colors(blocks), self._heights(blocks), per_row, empty)
        image = QImage(
            pixels.data, pixels.shape[1], pixels.shape[0], pixels.strides[0], QImage.Format.Format_ARGB32_Premultiplied
        )
        painter.drawImage(_MARGIN, _MARGIN + first * pitch, image)  # `pixels` must outlive this call

    def _fill_colors(self, blocks: slice) -> Pixels:
        theme, ids = self._theme, self._ids[blocks]
        names = [theme.block_active, theme.block_shared, *(tier_color(tier, theme) for tier in LOWER_TIERS)]
        kind = (self._ref_counts[blocks] > 1).astype(np.intp)
        if self._cache is not None:
            tiers = self._cache.rows_by_tier.tiers_of(ids)
            for index, tier in enumerate(LOWER_TIERS, start=2):
                kind[tiers == tier] = index
        colors: Pixels = np.array([QColor(name).rgba() for name in names], np.uint32)[kind]
        return colors

    def _heights(self, blocks: slice) -> IntArray:
        share = np.minimum(self._filled[blocks] / self._block_size, 1.0)
        heights: IntArray = np.rint(_SMALL_CELL.height() * share).astype(np.int64)
        return heights

    def _is_released(self, index: int) -> bool:
        # when a sliding window moves past a block, its table entry becomes a reserved block
        return self._cache is not None and int(self._ids[index]) < self._cache.num_reserved_blocks

    def _location(self, index: int) -> BlockLocation:
        row = int(self._ids[index])
        return BlockLocation(Tier.HBM, row) if self._cache is None else locate_block(self._cache, row)

    def cell_rect(self, index: int) -> QRect:
        cell = self._cell()
        row, column = divmod(index, self._per_row(self.width()))
        left = _MARGIN + column * (cell.width() + _GAP)
        return QRect(left, _MARGIN + row * (cell.height() + _GAP), cell.width(), cell.height())

    def _cell(self) -> QSize:
        return _named_cell_size() if self._ids.size <= MAX_NAMED else _SMALL_CELL

    def _per_row(self, width: int) -> int:
        return max((width - 2 * _MARGIN + _GAP) // (self._cell().width() + _GAP), 1)


def small_cells(colors: Pixels, heights: IntArray, per_row: int, empty: int) -> Pixels:
    """Draw rows of small cells, each filled from its bottom. Gaps and the unused end of the last row are transparent.

    `colors` and `heights` (of the filled part, in pixels) have shape (n,); `empty` is the colour of the unfilled part.
    The image has shape (rows * pitch, per_row * pitch).
    """
    side, pitch = _SMALL_CELL.height(), _SMALL_CELL.height() + _GAP
    rows = -(-colors.size // per_row)
    is_filled = np.arange(side) >= side - heights[:, None]  # (n, side)
    columns = np.zeros((rows * per_row, side), np.uint32)
    columns[: colors.size] = np.where(is_filled, colors[:, None], np.uint32(empty))
    image = np.zeros((rows, pitch, per_row, pitch), np.uint32)
    image[:, :side, :, :side] = columns.reshape(rows, per_row, side).transpose(0, 2, 1)[..., None]
    return image.reshape(rows * pitch, per_row * pitch)
