"""Widget of the page map: paints the scene's pixels, and turns mouse and keyboard input into camera moves, cursor and
selection.

Owns the hovered block and the keyboard cursor. The scene draws all cells.

See docs/internals/decisions/0009-the-page-map-is-one-image.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from PySide6.QtCore import QEvent, QPoint, QPointF, QRect, QRectF, QSize, Qt, QTimer, Signal
from PySide6.QtGui import (
    QContextMenuEvent,
    QFocusEvent,
    QImage,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QResizeEvent,
    QWheelEvent,
)
from PySide6.QtWidgets import QSizePolicy, QWidget

from kvscope_app.ui.announce import announce
from kvscope_app.ui.focus import draw_focus
from kvscope_app.ui.fonts import sans
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.views.page_map.drawing.block_numbers import draw_block_numbers, draw_gutter, gutter_left, gutter_width
from kvscope_app.views.page_map.drawing.headings import Heading, draw_headings
from kvscope_app.views.page_map.drawing.pin_marks import draw_pins
from kvscope_app.views.page_map.drawing.scene import Scene, Span

ZOOM_STEP: Final = 1.25
FADE_MS: Final = 40
_MIN_DRAG_DISTANCE: Final = 4
_HEADING_PAD: Final = 5
_MIN_SIZE: Final = QSize(180, 64)
_MIN_RING_WIDTH: Final = 12
CELL_KEYS: Final = {
    Qt.Key.Key_Left: (-1, 0),
    Qt.Key.Key_Right: (1, 0),
    Qt.Key.Key_Up: (0, -1),
    Qt.Key.Key_Down: (0, 1),
    Qt.Key.Key_PageUp: (0, -10),
    Qt.Key.Key_PageDown: (0, 10),
}
"""Number of cells (right, down) by which each key moves the cursor."""


class PageMapCanvas(QWidget):
    """Widget that shows `scene`. Its signals carry block ids, -1 for no block."""

    pointed = Signal(int)
    """Emitted when the mouse or the keyboard cursor moves to another block, or off all blocks (-1)."""
    chosen = Signal(int)
    """Emitted when a block is clicked, or Enter is pressed on it."""
    menu_requested = Signal(QPoint)
    """Emitted with the global position for the context menu of `current_block`."""
    inspect_requested = Signal()
    """Emitted when a block is double-clicked; the first click has already selected it."""
    dismissed = Signal()
    """Emitted on Escape, or on a click outside all blocks."""

    def __init__(self, scene: Scene, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.scene = scene
        self.theme: Theme = DARK
        self.pointed_block = -1
        self.selected_row = -1
        self.now_ns: Callable[[], int] = time.monotonic_ns
        """Clock of the fading flashes, in nanoseconds."""
        self.headings: tuple[Heading, ...] = ()
        self.cursor_block = -1
        self._pinned: frozenset[int] = frozenset()
        self.gutter = 0
        self._covered_height = 0
        self._press: QPointF | None = None
        self._last_drag_point: QPointF | None = None
        self._image = QImage()
        self._last_fade_ns = 0
        self._fade_timer = QTimer(self, interval=FADE_MS)
        self._fade_timer.timeout.connect(self._on_fade_timeout)
        self.setMouseTracking(True)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAttribute(Qt.WidgetAttribute.WA_OpaquePaintEvent)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setMinimumSize(_MIN_SIZE)
        self.setAccessibleName("Page map: one cell a block of the KV cache")

    def apply_theme(self, theme: Theme) -> None:
        self.theme = theme
        self.scene.set_theme(theme)
        self.update()

    def show_span(self, span: Span) -> None:
        if span is not None:
            ratio = self.devicePixelRatioF()
            left, top = self.gutter + int(gutter_left(self.scene, ratio)), int(span[0] / ratio)
            self.update(left, top, self.width() - left, int((span[1] - span[0]) / ratio) + 2)
        if self.scene.is_fading and not self._fade_timer.isActive():
            self._fade_timer.start()

    def fade(self) -> None:
        self._last_fade_ns = self.now_ns()
        self.show_span(self.scene.fade(self._last_fade_ns))

    @property
    def map_rect(self) -> QRect:
        """Part of the widget that shows blocks, without the row numbers and without the area that overlay strips cover.

        In a very low window the strips cover some rows, so that the map keeps its minimum height.
        """
        height = self.height() - self._covered_height
        return QRect(self.gutter, 0, self.width() - self.gutter, max(height, min(self.height(), _MIN_SIZE.height())))

    def set_covered_height(self, height: int) -> None:
        if height != self._covered_height:
            self._covered_height = height
            self.refit_pixels()
            self.update()

    def refit_pixels(self) -> None:
        ratio = self.devicePixelRatioF()
        gutter = gutter_width(self.scene.grid, self.width(), self.fontMetrics())
        self.gutter = gutter if self.scene.has_addresses else 0
        width, height = round(self.map_rect.width() * ratio), round(self.map_rect.height() * ratio)
        heading = round((self.fontMetrics().height() + _HEADING_PAD) * ratio)
        span = self.scene.resize(max(1, width), max(1, height), heading)
        pixels = self.scene.pixels
        # The image borrows the buffer; the scene keeps the buffer until the next refit_pixels replaces both.
        self._image = QImage(
            pixels.data, pixels.shape[1], pixels.shape[0], pixels.strides[0], QImage.Format.Format_RGB32
        )
        if span is not None:
            self.update()

    def show_selected(self, block: int | None) -> None:
        """Draw a ring around `block` and scroll it into view; None removes the ring."""
        row = -1 if block is None or self.scene.cells is None or block >= self.scene.grid.num_blocks else block
        if row == self.selected_row:
            return
        self.selected_row = row
        if row >= 0:
            self.show_span(self.scene.reveal(row))
        self.update()

    def show_headings(self, headings: tuple[Heading, ...]) -> None:
        if headings != self.headings:
            self.headings = headings
            self.update()

    def zoom(self, factor: float, center: QPointF | None = None) -> None:
        """Zoom by `factor` around a point of the widget, by default the map's centre."""
        x, y = self.to_scene(center) if center is not None else (self.scene.width / 2, self.scene.height / 2)
        self.show_span(self.scene.zoom(factor, x, y))
        self.update()

    def fit_all(self) -> None:
        self.show_span(self.scene.fit_all())
        self.update()

    def cell_rect(self, block: int) -> QRect:
        ratio = self.devicePixelRatioF()
        x, y = self.scene.camera.corner_of(*self.scene.grid.position_of(block))
        size = max(1.0, self.scene.camera.pitch / ratio)
        return QRectF(x / ratio + self.gutter, y / ratio, size, size).toAlignedRect()

    def announce(self, sentence: str) -> None:
        announce(self, sentence)

    @property
    def current_block(self) -> int:
        """Block that was last clicked or reached by keyboard; -1 if there is none."""
        return self.cursor_block

    def show_pins(self, pinned: frozenset[int]) -> None:
        if pinned != self._pinned:
            self._pinned = pinned
            self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        ratio = self.devicePixelRatioF()
        map_rect = self.map_rect
        strip = QRect(0, map_rect.bottom() + 1, self.width(), self.height())
        painter.fillRect(event.rect().intersected(strip), self.theme.color("base"))
        dirty = event.rect().intersected(QRect(0, 0, self.width(), map_rect.height()))
        target = QRectF(dirty.intersected(map_rect))
        source = QRectF(
            (target.x() - self.gutter) * ratio,
            target.y() * ratio,
            target.width() * ratio,
            target.height() * ratio,
        )
        painter.drawImage(target, self._image, source)
        if dirty.x() < self.gutter:
            painter.fillRect(QRect(0, dirty.y(), self.gutter, dirty.height()), self.theme.color("base"))
        if dirty.x() < self.gutter + gutter_left(
            self.scene, ratio
        ):  # the gutter is over the image where the window is wider than the grid
            draw_gutter(painter, self.scene, self.theme, self.gutter, ratio, dirty)
        painter.setFont(sans(0.82))
        painter.setClipRect(map_rect)
        draw_block_numbers(painter, self.scene, self.gutter, ratio)
        draw_pins(painter, self.scene, self._pinned, self.theme, self.gutter, ratio)
        draw_headings(painter, self.scene, self.theme, self.headings, QRectF(dirty), self.gutter, ratio)
        self._draw_pointer(painter)
        if self.hasFocus():
            painter.setClipping(False)
            draw_focus(painter, self.rect().adjusted(0, 0, 0, map_rect.bottom() - self.rect().bottom()), self.theme)
        painter.end()

    def resizeEvent(self, event: QResizeEvent) -> None:
        self.refit_pixels()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.DevicePixelRatioChange, QEvent.Type.FontChange):
            self.refit_pixels()

    def wheelEvent(self, event: QWheelEvent) -> None:
        steps = event.angleDelta().y() / 120
        if steps and self.scene.cells is not None:
            self.zoom(ZOOM_STEP**steps, event.position())
            self._set_pointed_position(event.position())
        event.accept()

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() in (Qt.MouseButton.LeftButton, Qt.MouseButton.MiddleButton):
            self._press = event.position()

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton and self._block_at(event.position()) >= 0:
            self.inspect_requested.emit()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        if self._press is not None and self._is_drag(event.position()):
            previous = self._last_drag_point or self._press
            self._last_drag_point = event.position()
            self.setCursor(Qt.CursorShape.ClosedHandCursor)
            ratio, moved = self.devicePixelRatioF(), event.position() - previous
            self.show_span(self.scene.pan(moved.x() * ratio, moved.y() * ratio))
            self.update()
        elif self._press is None:
            self._set_pointed_position(event.position())

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        was_click = self._press is not None and self._last_drag_point is None
        self._press = self._last_drag_point = None
        self.unsetCursor()
        if was_click and event.button() == Qt.MouseButton.LeftButton:
            block = self._block_at(event.position())
            self.cursor_block = block
            if block >= 0:
                self.chosen.emit(block)
            else:
                self.dismissed.emit()
            self.update()

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        if event.reason() is not QContextMenuEvent.Reason.Keyboard:
            self.cursor_block = self._block_at(QPointF(event.pos()))
        self.update()
        at_cursor = event.reason() is QContextMenuEvent.Reason.Keyboard and self.cursor_block >= 0
        position = self.mapToGlobal(self.cell_rect(self.cursor_block).bottomRight()) if at_cursor else event.globalPos()
        self.menu_requested.emit(position)

    def leaveEvent(self, event: QEvent) -> None:
        self._set_pointed_block(-1)

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        self._set_pointed_block(-1)
        self.update()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        key = Qt.Key(event.key())
        if key in CELL_KEYS and self.scene.cells is not None:
            self._move_cursor(*CELL_KEYS[key], pan=bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier))
        elif key in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and self.cursor_block >= 0:
            self.chosen.emit(self.cursor_block)
        elif key == Qt.Key.Key_Escape:
            self.cursor_block = -1
            self._set_pointed_block(-1)
            self.dismissed.emit()
        else:
            super().keyPressEvent(event)

    def _move_cursor(self, dx: int, dy: int, pan: bool) -> None:
        if pan:
            step = 48 * self.devicePixelRatioF()
            self.show_span(self.scene.pan(-dx * step, -dy * step))
            self.update()
            return
        grid = self.scene.grid
        block = grid.step_from(self.cursor_block, dx, dy)
        self.cursor_block = block
        self.show_span(self.scene.reveal(block))
        self._set_pointed_block(block)
        self.update()

    def _set_pointed_position(self, position: QPointF) -> None:
        self._set_pointed_block(self._block_at(position))

    def _set_pointed_block(self, block: int) -> None:
        if block == self.pointed_block:
            return
        for old_or_new in (self.pointed_block, block):
            if old_or_new >= 0:
                self.update(self.cell_rect(old_or_new).adjusted(-4, -4, 4, 4))
        self.pointed_block = block
        self.pointed.emit(block)

    def _block_at(self, position: QPointF) -> int:
        if not self.map_rect.contains(position.toPoint()):
            return -1
        block = self.scene.block_at(*self.to_scene(position))
        return -1 if block is None else block

    def to_scene(self, position: QPointF) -> tuple[float, float]:
        ratio = self.devicePixelRatioF()
        return (position.x() - self.gutter) * ratio, position.y() * ratio

    def _is_drag(self, position: QPointF) -> bool:
        if self._last_drag_point is not None:
            return True
        return self._press is not None and (position - self._press).manhattanLength() >= _MIN_DRAG_DISTANCE

    def _on_fade_timeout(self) -> None:
        if self.now_ns() - self._last_fade_ns >= FADE_MS * 900_000:
            self.fade()
        if not self.scene.is_fading:
            self._fade_timer.stop()

    def _draw_pointer(self, painter: QPainter) -> None:
        painter.setBrush(Qt.BrushStyle.NoBrush)
        if 0 <= self.selected_row < self.scene.grid.num_blocks:
            self._draw_ring(painter, self.cell_rect(self.selected_row))
        if self.pointed_block >= 0:
            painter.setPen(QPen(self.theme.color("text"), 1.5))
            painter.drawRect(self.cell_rect(self.pointed_block).adjusted(-2, -2, 1, 1))
        if self.cursor_block >= 0 and self.hasFocus():
            painter.setPen(QPen(self.theme.color("accent"), 2))
            painter.drawRect(self.cell_rect(self.cursor_block).adjusted(-3, -3, 2, 2))

    def _draw_ring(self, painter: QPainter, cell: QRect) -> None:
        margin = max(2, (_MIN_RING_WIDTH - cell.width()) // 2)
        ring = QRectF(cell.adjusted(-margin, -margin, margin - 1, margin - 1))
        for color, width in (("base", 4), ("selection", 2)):  # visible on any background
            painter.setPen(QPen(self.theme.color(color), width))
            painter.drawRoundedRect(ring, 3, 3)
