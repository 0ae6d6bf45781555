"""Widget of a heatmap picture: draws the picture and its row labels, and moves a cell cursor by keyboard.

Owns the cell cursor. `HeatRaster` computes the pixels; the view supplies all text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from PySide6.QtCore import QPointF, QRect, QRectF, QSize, Qt, Signal
from PySide6.QtGui import (
    QImage,
    QKeyEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QResizeEvent,
    QShowEvent,
)
from PySide6.QtWidgets import QSizePolicy, QWidget

from kvscope_app.ui.announce import announce
from kvscope_app.ui.focus import draw_focus
from kvscope_app.ui.fonts import sans
from kvscope_app.ui.theme import Theme, mix
from kvscope_app.views.heatmap.heat_raster import HeatRaster
from kvscope_app.views.heatmap.key_store import KeyStore
from kvscope_app.views.heatmap.time_area import ZOOM_STEP, TimeArea, gutter
from kvscope_app.views.heatmap.time_frame import TimeFrame, TimeFrameMode
from kvscope_app.views.page_map.drawing.pixel_tables import Pixels, pixel
from kvscope_app.views.page_map.page_map_canvas import CELL_KEYS
from kvscope_telemetry.summaries.summary import SECOND_NS

_GAP_SHARE: Final = 0.30
_STOP_SHARE: Final = 0.45
"""Opacity, 0 to 1, of the band over time in which the engine was stopped. The picture is visible through it."""


class RowLabel(NamedTuple):
    """Text to the left of the heatmap at a row of cells. `line` says whether a border is drawn above the row."""

    cell: float
    text: str
    line: bool = False


class Cell(NamedTuple):
    time_ns: int
    row: int


class HeatCanvas(TimeArea):
    cell_pointed = Signal(object)
    """Emitted with the `Cell` at the pointer or the keyboard cursor, or None if there is none."""

    def __init__(self, frame: TimeFrame, name: str, *, height: int, grows: bool, parent: QWidget | None = None) -> None:
        super().__init__(frame, parent)
        self.raster = HeatRaster()
        self.store: KeyStore | None = None
        self.labels: tuple[RowLabel, ...] = ()
        self.cell: Cell | None = None
        self._height = height
        self._image = QImage()
        vertical = QSizePolicy.Policy.Expanding if grows else QSizePolicy.Policy.Fixed
        self.setSizePolicy(QSizePolicy.Policy.Expanding, vertical)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName(name)
        self.setMinimumHeight(height // 2 if grows else height)
        frame.changed.connect(self.redraw)
        self.pointed.connect(lambda at: self.cell_pointed.emit(None if at is None else self._cell_at(at)))

    def sizeHint(self) -> QSize:
        return QSize(240, self._height)

    def set_colors(self, colors: Pixels, theme: Theme) -> None:
        """Set the pixel of each cell key, shape (256,), and the theme for everything else."""
        hatch = mix(theme.base, theme.muted, _GAP_SHARE)
        self.raster.set_colors(colors, pixel(theme.base), pixel(hatch))
        self.redraw()

    def show_store(self, store: KeyStore, labels: Sequence[RowLabel], from_ns: int | None) -> None:
        """Show the cell keys of `store`. Keys from `from_ns` on have changed."""
        if store is not self.store or tuple(labels) != self.labels:
            self.store, self.labels = store, tuple(labels)
            self.update()
        self.redraw(from_ns)

    def redraw(self, from_ns: int | None = None) -> None:
        if self.store is None or not self.isVisible():
            self.raster.invalidate()
            return
        ratio = self.devicePixelRatioF()
        if self.raster.draw(self.store, self.frame.scale, round(self.height() * ratio), from_ns):
            self.update()
        pixels = self.raster.pixels
        if self._image.isNull() or (self._image.height(), self._image.width()) != pixels.shape:
            self._image = QImage(
                pixels.data, pixels.shape[1], pixels.shape[0], pixels.strides[0], QImage.Format.Format_RGB32
            )

    def zoom_by(self, steps: int) -> None:
        """Zoom around the cell cursor.

        Without a cell cursor, zooms around the newest second if the view follows the newest data, otherwise around the
        middle.
        """
        if not steps:
            self.frame.fit()
            return
        scale = self.frame.scale
        at_newest = float(scale.width) if self.frame.mode is TimeFrameMode.FOLLOW else scale.width / 2
        self.frame.zoom(ZOOM_STEP**steps, at_newest if self.cell is None else scale.x_of(self.cell.time_ns))

    def announce(self, sentence: str) -> None:
        announce(self, sentence)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(event.rect(), self.theme.color("base"))
        ratio = self.devicePixelRatioF()
        if self.store is not None:
            size = QRectF(gutter(), 0, self._image.width() / ratio, self._image.height() / ratio)
            painter.drawImage(size, self._image, QRectF(self._image.rect()))
        self._draw_labels(painter)
        self.draw_stops(painter, _STOP_SHARE)
        self.draw_cursor(painter)
        self._draw_cell(painter)
        if self.hasFocus():
            draw_focus(painter, self.rect(), self.theme)
        painter.end()

    def resizeEvent(self, event: QResizeEvent) -> None:
        self.redraw()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.redraw()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        key = Qt.Key(event.key())
        if key in CELL_KEYS and self.store is not None and len(self.store):
            self._step_cell(*CELL_KEYS[key])
        elif key in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and self.cell is not None:
            self.chosen.emit(self.cell.time_ns)
        elif key == Qt.Key.Key_Escape:
            self._set_cell(None)
        else:
            super().keyPressEvent(event)

    def _step_cell(self, dx: int, dy: int) -> None:
        assert self.store is not None, "no store is shown"
        step_ns = max(SECOND_NS, self.frame.scale.column_ns)
        cell = self.cell
        if cell is None:
            scale = self.frame.scale
            start_ns = min(max(self.cursor_ns or scale.end_ns, scale.begin_ns), scale.end_ns - 1)
            cell, dx, dy = Cell(start_ns // SECOND_NS * SECOND_NS + SECOND_NS // 2, 0), 0, 0
        first_ns, last_ns = self.store.first_ns, self.store.last_ns
        time_ns = min(max(cell.time_ns + dx * step_ns, first_ns), last_ns - 1)
        self._set_cell(Cell(time_ns, min(max(cell.row + dy, 0), self.store.num_cells - 1)))

    def _set_cell(self, cell: Cell | None) -> None:
        self.cell = cell
        if cell is not None:
            self.frame.reveal(cell.time_ns)
        self.cell_pointed.emit(cell)
        self.update()

    def _cell_at(self, position: QPointF) -> Cell | None:
        if self.store is None:
            return None
        row = int(position.y() * self.store.num_cells / max(self.height(), 1))
        return Cell(self.time_at(position.x()), min(max(row, 0), self.store.num_cells - 1))

    def _draw_labels(self, painter: QPainter) -> None:
        painter.setFont(sans(0.86))
        metrics = painter.fontMetrics()
        num_cells = max(self.store.num_cells if self.store is not None else 1, 1)
        bottom = -2
        for label in self.labels:
            y = round(label.cell * self.height() / num_cells)
            if label.line:
                painter.fillRect(0, y, self.width(), 1, self.theme.color("muted"))
            top = min(max(y + 1, 0), self.height() - metrics.height())
            if top >= bottom + 2:
                painter.setPen(self.theme.color("muted"))
                painter.drawText(QRect(0, top, gutter() - 6, metrics.height()), Qt.AlignmentFlag.AlignRight, label.text)
                bottom = top + metrics.height()

    def _draw_cell(self, painter: QPainter) -> None:
        if self.cell is None or not self.hasFocus() or self.store is None:
            return
        cell_height = self.height() / self.store.num_cells
        left, right = (self.x_of(t) for t in (self.cell.time_ns // SECOND_NS * SECOND_NS,) * 2)
        right += max(SECOND_NS / self.frame.scale.column_ns / self.devicePixelRatioF(), 1)
        painter.setPen(QPen(self.theme.color("accent"), 2))
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.drawRect(
            QRectF(left, self.cell.row * cell_height, right - left, max(cell_height, 1)).adjusted(-3, -3, 3, 3)
        )
