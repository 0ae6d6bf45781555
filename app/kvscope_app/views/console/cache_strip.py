"""Strip of one chat turn: a segment per block of its request, in the colours of the page map, with a mark on reused
blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
from PySide6.QtCore import QEvent, QPoint, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QColor, QHelpEvent, QKeyEvent, QMouseEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from kvscope_app.ui.announce import announce
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.console.turn_blocks import TurnBlocks, TurnBlockState, no_blocks
from kvscope_app.views.page_map.color_modes import lower_cached

_HEIGHT: Final = 14
_MARK_HEIGHT: Final = 3
_MAX_PITCH: Final = 12
_MIN_PITCH: Final = 4
"""Minimum width of a block in pixels. If the blocks do not fit, each pixel shows several."""
_EARLIER_SHARE: Final = 0.5
"""Maximum share of the width for blocks of earlier turns, if the blocks do not fit."""
_EARLIER_ALPHA: Final = 110
_HINT: Final = "Click to select this turn's blocks. The line below reused blocks marks what was found in the cache."
_STEPS: Final = {Qt.Key.Key_Left: -1, Qt.Key.Key_Right: 1}


class CacheStrip(QWidget):
    """Segments of a turn's blocks. The earlier turns' blocks are drawn paler, at the left."""

    chosen = Signal(int)
    """Emitted with the index of the block that was clicked, or chosen by Enter."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.blocks: TurnBlocks = no_blocks("")
        self.cursor_index = -1
        """Index of the block that the arrow keys have reached, -1 before they are used."""
        self._theme: Theme = DARK
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setAccessibleName("Blocks of this turn")

    def show_blocks(self, blocks: TurnBlocks) -> None:
        if blocks.equals(self.blocks):
            return
        self.blocks = blocks
        self.cursor_index = min(self.cursor_index, blocks.states.size - 1)
        self.setAccessibleName(f"Blocks of this turn: {blocks.summary}")
        self.update()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self.update()

    def block_at(self, x: float) -> int | None:
        """Return the index of the block at the horizontal position `x` in pixels, the lowest if several share a pixel;
        None beside the blocks.
        """
        for first, num_blocks, left, pitch in self._regions():
            if left <= x < left + num_blocks * pitch:
                return first + min(int((x - left) / pitch), num_blocks - 1)
        return None

    def tip_at(self, index: int | None) -> str:
        """Return the tooltip for the block at `index`, or for the whole strip."""
        line = self.blocks.summary if index is None else self.blocks.describe(index)
        return f"{line}\n{_HINT}" if self.blocks.states.size else line

    def sizeHint(self) -> QSize:
        return QSize(scaled(160), scaled(_HEIGHT))

    def minimumSizeHint(self) -> QSize:
        return QSize(scaled(40), scaled(_HEIGHT))

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        for first, num_blocks, left, pitch in self._regions():
            if pitch >= _MIN_PITCH:
                for index in range(first, first + num_blocks):
                    self._draw(painter, left + (index - first) * pitch, pitch - 1, slice(index, index + 1))
            else:
                for x, width, blocks in merged_runs(self.blocks, first, num_blocks, pitch):
                    self._draw(painter, left + x, width, blocks)
        if self.hasFocus():
            self._draw_focus(painter)
        painter.end()

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            QToolTip.showText(event.globalPos(), plain_tip(self.tip_at(self.block_at(event.pos().x()))), self)
            return True
        return super().event(event)

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        index = self.block_at(event.position().x())
        if event.button() == Qt.MouseButton.LeftButton and index is not None:
            self.chosen.emit(index)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        num_blocks = self.blocks.states.size
        key = Qt.Key(event.key())
        if num_blocks and key in _STEPS:
            self._move_cursor(min(max(self.cursor_index + _STEPS[key], 0), num_blocks - 1))
        elif num_blocks and key in (Qt.Key.Key_Home, Qt.Key.Key_End):
            self._move_cursor(0 if key == Qt.Key.Key_Home else num_blocks - 1)
        elif num_blocks and key in (Qt.Key.Key_Return, Qt.Key.Key_Enter, Qt.Key.Key_Space):
            self.chosen.emit(max(self.cursor_index, 0))
        else:
            super().keyPressEvent(event)

    def _move_cursor(self, index: int) -> None:
        self.cursor_index = index
        line = self.blocks.describe(index)
        announce(self, line)
        x = next(
            left + (index - first + 0.5) * pitch
            for first, num_blocks, left, pitch in self._regions()
            if first <= index < first + num_blocks
        )
        QToolTip.showText(self.mapToGlobal(QPoint(round(x), self.height())), plain_tip(line), self)
        self.update()

    def _regions(self) -> Iterator[tuple[int, int, float, float]]:
        """Yield (first block, number of blocks, left edge, width of a block) of the earlier turns and of this turn.

        Edges and widths are in pixels.
        """
        num_blocks, num_earlier = self.blocks.states.size, self.blocks.num_earlier
        num_own, width = num_blocks - num_earlier, float(self.width())
        if not num_blocks or not width:
            return
        pitch = min(float(scaled(_MAX_PITCH)), width / num_blocks)
        pitches = (float(int(pitch)),) * 2 if pitch >= _MIN_PITCH else (pitch, pitch)
        if pitch < _MIN_PITCH and num_earlier and num_own:
            earlier_width = min(num_earlier * pitch, width * _EARLIER_SHARE)
            own_pitch = min((width - earlier_width) / num_own, float(_MIN_PITCH))
            pitches = (min((width - num_own * own_pitch) / num_earlier, float(_MIN_PITCH)), own_pitch)
        if num_earlier:
            yield 0, num_earlier, 0.0, pitches[0]
        if num_own:
            yield num_earlier, num_own, num_earlier * pitches[0], pitches[1]

    def _draw(self, painter: QPainter, left: float, width: float, blocks: slice) -> None:
        mark, height = scaled(_MARK_HEIGHT), float(self.height())
        state = TurnBlockState(int(self.blocks.states[blocks].max()))
        alpha = _EARLIER_ALPHA if blocks.start < self.blocks.num_earlier else 255
        color = QColor(state_color(state, self._theme))
        color.setAlpha(alpha)
        box = QRectF(left, 0, max(width, 1.0), height - mark - 1)
        if state in (TurnBlockState.EVICTED, TurnBlockState.RELEASED) and width >= _MIN_PITCH - 1:
            painter.setPen(QPen(color, 1))  # an outline: the block is gone
            painter.drawRect(box.adjusted(0.5, 0.5, -0.5, -0.5))
        else:
            painter.fillRect(box, color)
        if self.blocks.num_reused is not None and blocks.start < self.blocks.num_reused:
            painter.fillRect(QRectF(left, height - mark, max(width, 1.0), mark), self._theme.color("accent"))

    def _draw_focus(self, painter: QPainter) -> None:
        painter.setPen(QPen(self._theme.color("accent"), 1))
        painter.drawRect(QRectF(self.rect()).adjusted(0.5, 0.5, -0.5, -0.5))
        for first, num_blocks, left, pitch in self._regions():
            if first <= self.cursor_index < first + num_blocks:
                x = left + (self.cursor_index - first) * pitch
                painter.setPen(QPen(self._theme.color("text"), 1.5))
                painter.drawRect(QRectF(x, 0.5, max(pitch - 1, 2.0), self.height() - 1.0))


def state_color(state: TurnBlockState, theme: Theme) -> str:
    """Return the colour of the page map's mode "state" for blocks in this state, and the colour of its evictions."""
    return {
        TurnBlockState.UNKNOWN: theme.muted,
        TurnBlockState.IN_USE: theme.block_active,
        TurnBlockState.SHARED: theme.block_shared,
        TurnBlockState.CACHED: theme.block_cached,
        TurnBlockState.HOST: lower_cached(theme.block_host, theme),
        TurnBlockState.DISK: lower_cached(theme.block_disk, theme),
        TurnBlockState.RELEASED: theme.muted,
        TurnBlockState.EVICTED: theme.flash_evicted,
    }[state]


def merged_runs(blocks: TurnBlocks, first: int, num_blocks: int, pitch: float) -> Iterator[tuple[float, float, slice]]:
    """Yield (left edge, width, blocks) of runs of pixels that look the same, for blocks narrower than `_MIN_PITCH`.

    A pixel shows the highest state of its blocks, so that a single evicted block stays visible.
    """
    num_pixels = max(int(num_blocks * pitch), 1)
    starts: npt.NDArray[np.int64] = first + np.arange(num_pixels) * num_blocks // num_pixels
    states = np.maximum.reduceat(blocks.states[: first + num_blocks], starts)
    is_reused = starts < (blocks.num_reused or 0)
    changes = np.flatnonzero((states[1:] != states[:-1]) | (is_reused[1:] != is_reused[:-1])) + 1
    edges = [0, *changes.tolist(), num_pixels]
    for begin, end in pairwise(edges):
        until = int(starts[end]) if end < num_pixels else first + num_blocks
        yield float(begin), float(end - begin), slice(int(starts[begin]), until)
