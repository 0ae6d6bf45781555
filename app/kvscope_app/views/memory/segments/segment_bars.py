"""Paints segments as horizontal bars with coloured blocks. Only the visible rows are painted.

Owns layout and colours; `segment_figures` supplies the text.
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

_ROW_HEIGHT: Final = 24
_BAR_HEIGHT: Final = 16
_NAME_WIDTH: Final = 170
"""Width in pixels of the column of segment names, left of the bars."""
_MIN_BAR_WIDTH: Final = 3
_MIN_SEAM_WIDTH: Final = 4


class SegmentBars(QWidget):
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
        self.setMinimumHeight(_ROW_HEIGHT * len(segments))
        self.update()

    def set_to_scale(self, is_to_scale: bool) -> None:
        """Make the lengths of the bars proportional to the sizes of the segments, or give all bars the full width."""
        self._is_to_scale = is_to_scale
        self.update()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(640, _ROW_HEIGHT * len(self._segments))

    def tip_at(self, position: QPoint) -> str:
        row = position.y() // _ROW_HEIGHT
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
        first, last = event.rect().top() // _ROW_HEIGHT, event.rect().bottom() // _ROW_HEIGHT
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
        return QRect(
            _NAME_WIDTH,
            row * _ROW_HEIGHT + (_ROW_HEIGHT - _BAR_HEIGHT) // 2,
            max(_MIN_BAR_WIDTH, round(full_width * share)),
            _BAR_HEIGHT,
        )

    def _paint_row(self, painter: QPainter, row: int) -> None:
        segment, box = self._segments[row], self._box(row)
        name_box = QRect(0, row * _ROW_HEIGHT, _NAME_WIDTH - 10, _ROW_HEIGHT)
        painter.setPen(self._theme.color("text"))
        name = painter.fontMetrics().elidedText(segment_name(segment), Qt.TextElideMode.ElideRight, name_box.width())
        painter.drawText(name_box, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, name)
        painter.fillRect(box, self._theme.color("raised"))
        if not len(segment.sizes):
            return
        for start, end, state in _runs(segment, box.width()):
            painter.fillRect(box.left() + start, box.top(), end - start, box.height(), state_color(state, self._theme))
        self._paint_seams(painter, segment, box)
        if row == self._largest[0]:
            self._outline_largest(painter, segment, box)

    def _paint_seams(self, painter: QPainter, segment: TorchSegment, box: QRect) -> None:
        scale = box.width() / max(1, segment.num_bytes)
        has_seam = segment.sizes * scale >= _MIN_SEAM_WIDTH
        for end in ((segment.offsets + segment.sizes)[has_seam] * scale).astype(int).tolist():
            painter.fillRect(box.left() + end - 1, box.top(), 1, box.height(), self._theme.color("panel"))

    def _outline_largest(self, painter: QPainter, segment: TorchSegment, box: QRect) -> None:
        scale, block = box.width() / max(1, segment.num_bytes), self._largest[1]
        left, width = int(segment.offsets[block] * scale), int(segment.sizes[block] * scale)
        painter.setPen(self._theme.color("selection"))
        painter.drawRect(box.left() + left, box.top() - 1, max(2, width - 1), box.height() + 1)


def state_color(state: int, theme: Theme) -> QColor:
    if state == State.ALLOCATED:
        return theme.color("block_active")
    if state == State.CACHED:
        return theme.color("block_cached")
    return theme.color("block_shared") if state == State.PENDING else QColor(mix(theme.muted, theme.panel, 0.4))


def _largest_cached(segments: list[TorchSegment]) -> tuple[int, int]:
    """Return the row and the block index of the largest cached block, or -1 each if nothing is cached."""
    row = max(range(len(segments)), key=lambda row: segments[row].largest_cached, default=-1)
    if row < 0 or not segments[row].largest_cached:
        return -1, -1
    segment = segments[row]
    return row, int(np.argmax(np.where(segment.states == State.CACHED, segment.sizes, -1)))


def _runs(segment: TorchSegment, width: int) -> list[tuple[int, int, int]]:
    """Return (start, end, state) of each run of pixels of equal state, in pixels of a bar of `width`.

    A pixel has the state of the block at its middle. Pixels without a block are in no run.
    """
    positions = (np.arange(width) + 0.5) * segment.num_bytes / width
    blocks = np.maximum(np.searchsorted(segment.offsets, positions, "right") - 1, 0)
    is_block = (positions >= segment.offsets[blocks]) & (positions < segment.offsets[blocks] + segment.sizes[blocks])
    states = np.where(is_block, segment.states[blocks].astype(int), -1)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(states)) + 1))
    ends = np.concatenate((starts[1:], [width]))
    runs = zip(starts.tolist(), ends.tolist(), states[starts].tolist(), strict=True)
    return [run for run in runs if run[2] >= 0]
