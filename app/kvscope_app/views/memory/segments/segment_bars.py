"""Segments as horizontal bars with coloured blocks; only the visible rows are painted.

Owns layout and colours; `segment_figures` owns the text.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from PySide6.QtCore import QEvent, QPoint, QRect, QSize, Qt
from PySide6.QtGui import QColor, QHelpEvent, QPainter, QPaintEvent
from PySide6.QtWidgets import QToolTip, QWidget

from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.theme import DARK, Theme, mix
from kvscope_app.views.memory.segments.segment_figures import block_tip, segment_name, segment_tip
from kvscope_telemetry.mirror.allocator_map import State, TorchSegment

_ROW: Final = 24
_BAR: Final = 16
_NAME_WIDTH: Final = 170
"""Width in pixels of the column of segment names, to the left of the bars."""
_MIN_BAR_WIDTH: Final = 3
"""Minimum width of a bar in pixels."""
_SEAM_FROM: Final = 4
"""Minimum width in pixels of a block that is drawn with a separating line at its end."""


class SegmentBars(QWidget):
    """Widget with one bar per segment, in the given order. Lengths are proportional to sizes, or all equal."""

    def __init__(self) -> None:
        super().__init__()
        self._segments: list[TorchSegment] = []
        self._theme: Theme = DARK
        self._is_to_scale = True
        self._largest = (-1, -1)
        self.setAccessibleName("Segments of torch's allocator")

    def show_segments(self, segments: list[TorchSegment]) -> None:
        self._segments = segments
        self._largest = _largest_cached(segments)
        self.setAccessibleDescription(f"{len(segments)} segments")
        self.setMinimumHeight(_ROW * len(segments))
        self.update()

    def set_to_scale(self, is_to_scale: bool) -> None:
        """Set whether bar lengths are proportional to sizes; otherwise each bar has the full width."""
        self._is_to_scale = is_to_scale
        self.update()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(640, _ROW * len(self._segments))

    def tip_at(self, position: QPoint) -> str:
        """Return the tooltip at a position, or "" if there is none."""
        row = position.y() // _ROW
        if not 0 <= row < len(self._segments):
            return ""
        segment, box = self._segments[row], self._box(row)
        if not box.left() <= position.x() <= box.right() or not len(segment.sizes):
            return segment_tip(segment)
        offset = (position.x() - box.left() + 0.5) * segment.num_bytes / box.width()
        block = max(0, int(np.searchsorted(segment.offsets, offset, "right")) - 1)
        return block_tip(segment, block)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        first, last = event.rect().top() // _ROW, event.rect().bottom() // _ROW
        for row in range(max(0, first), min(last + 1, len(self._segments))):
            self._paint_row(painter, row)
        painter.end()

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            QToolTip.showText(event.globalPos(), plain_tip(self.tip_at(event.pos())), self)
            return True
        return super().event(event)

    def _box(self, row: int) -> QRect:
        full_width = max(_MIN_BAR_WIDTH, self.width() - _NAME_WIDTH - 2)
        max_bytes = max((segment.num_bytes for segment in self._segments), default=1)
        share = self._segments[row].num_bytes / max(1, max_bytes) if self._is_to_scale else 1.0
        return QRect(_NAME_WIDTH, row * _ROW + (_ROW - _BAR) // 2, max(_MIN_BAR_WIDTH, round(full_width * share)), _BAR)

    def _paint_row(self, painter: QPainter, row: int) -> None:
        one, box = self._segments[row], self._box(row)
        names = QRect(0, row * _ROW, _NAME_WIDTH - 10, _ROW)
        painter.setPen(self._theme.color("text"))
        name = painter.fontMetrics().elidedText(segment_name(one), Qt.TextElideMode.ElideRight, names.width())
        painter.drawText(names, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, name)
        painter.fillRect(box, self._theme.color("raised"))
        if not len(one.sizes):
            return
        for begin, end, state in _runs(one, box.width()):
            painter.fillRect(box.left() + begin, box.top(), end - begin, box.height(), state_color(state, self._theme))
        self._paint_seams(painter, one, box)
        if row == self._largest[0]:
            self._outline(painter, one, box)

    def _paint_seams(self, painter: QPainter, segment: TorchSegment, box: QRect) -> None:
        scale = box.width() / max(1, segment.num_bytes)
        wide = segment.sizes * scale >= _SEAM_FROM
        for end in ((segment.offsets + segment.sizes)[wide] * scale).astype(int).tolist():
            painter.fillRect(box.left() + end - 1, box.top(), 1, box.height(), self._theme.color("panel"))

    def _outline(self, painter: QPainter, segment: TorchSegment, box: QRect) -> None:
        scale, block = box.width() / max(1, segment.num_bytes), self._largest[1]
        left, width = int(segment.offsets[block] * scale), int(segment.sizes[block] * scale)
        painter.setPen(self._theme.color("selection"))
        painter.drawRect(box.left() + left, box.top() - 1, max(2, width - 1), box.height() + 1)


def state_color(state: int, theme: Theme) -> QColor:
    """Return the colour of a block state, as the page map uses it for the corresponding states."""
    if state == State.ALLOCATED:
        return theme.color("block_active")
    if state == State.CACHED:
        return theme.color("block_cached")
    return theme.color("block_shared") if state == State.PENDING else QColor(mix(theme.muted, theme.panel, 0.4))


def _largest_cached(segments: list[TorchSegment]) -> tuple[int, int]:
    """Return (row, block) of the largest cached block, -1 each if there is none."""
    row = max(range(len(segments)), key=lambda row: segments[row].largest_cached, default=-1)
    if row < 0 or not segments[row].largest_cached:
        return -1, -1
    one = segments[row]
    return row, int(np.argmax(np.where(one.states == State.CACHED, one.sizes, -1)))


def _runs(segment: TorchSegment, width: int) -> list[tuple[int, int, int]]:
    """Return (start, end, state) of each run of pixels of equal state, in pixels of a bar of `width`.

    The state of a pixel is that of the block at its middle. Pixels without a block are in no run.
    """
    positions = (np.arange(width) + 0.5) * segment.num_bytes / width
    blocks = np.maximum(np.searchsorted(segment.offsets, positions, "right") - 1, 0)
    is_there = (positions >= segment.offsets[blocks]) & (positions < segment.offsets[blocks] + segment.sizes[blocks])
    states = np.where(is_there, segment.states[blocks].astype(int), -1)
    begins = np.concatenate(([0], np.flatnonzero(np.diff(states)) + 1))
    ends = np.concatenate((begins[1:], [width]))
    runs = zip(begins.tolist(), ends.tolist(), states[begins].tolist(), strict=True)
    return [run for run in runs if run[2] >= 0]
