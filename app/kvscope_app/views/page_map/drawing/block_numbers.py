"""Block numbers next to the grid's rows and inside the cells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from PySide6.QtCore import QRect, QRectF, Qt
from PySide6.QtGui import QColor, QFontMetrics, QPainter

from kvscope_app.ui.number_text import count
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.page_map.drawing.grid import Grid, Section
from kvscope_app.views.page_map.drawing.scene import Scene

_MIN_WIDTH_FOR_GUTTER: Final = 340
_LABEL_SPACING: Final = 40
_PAD: Final = 10
_MIN_PITCH_FOR_NUMBERS: Final = 46
"""Minimum cell pitch for numbers inside cells, in device-independent pixels at 100 % scale."""


def gutter_width(grid: Grid, width: int, metrics: QFontMetrics) -> int:
    """Return the width of the column with row numbers in device-independent pixels; 0 in a narrow window."""
    if width < _MIN_WIDTH_FOR_GUTTER:
        return 0
    return metrics.horizontalAdvance(count(max(grid.num_blocks, 1000))) + _PAD


def gutter_left(scene: Scene, ratio: float) -> float:
    """Return the x coordinate of the column with row numbers, in device-independent pixels. It exceeds 0 if the grid is
    narrower than the window and therefore centred.
    """
    return max(0.0, scene.camera.x / ratio)


def draw_gutter(painter: QPainter, scene: Scene, theme: Theme, gutter: int, ratio: float, dirty: QRect) -> None:
    """Draw, left of some rows, the index of the row's first block within its section."""
    if scene.cells is None:
        return
    painter.setPen(theme.color("muted"))
    left = gutter_left(scene, ratio)
    pitch, height = scene.camera.pitch / ratio, painter.fontMetrics().height()
    sections = scene.grid.sections
    for previous, section in zip((None, *sections), sections, strict=False):
        is_crowded = previous is not None and labels_overlap(previous, section, scene.grid.columns, pitch, height)
        for row, y in _labelled_rows(scene, section, ratio, height, dirty):
            if row == 0 and is_crowded:
                continue
            top = min(max(0.0, y + pitch / 2 - height / 2), scene.height / ratio - height)
            box = QRectF(left, top, gutter - _PAD, height)
            number = row * scene.grid.columns
            painter.drawText(box, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, count(number))


def labels_overlap(previous: Section, section: Section, columns: int, pitch: float, height: float) -> bool:
    """Whether the first row number of `section` would overlap the last one of `previous`, the section above it.

    `pitch` (of cells) and `height` (of the text) are in device-independent pixels.
    """
    interval = _nice_step(scaled(_LABEL_SPACING) / pitch)
    last_row = (-(-previous.size // columns) - 1) // interval * interval
    return (section.first_row - previous.first_row - last_row) * pitch < height


def _labelled_rows(
    scene: Scene, section: Section, ratio: float, height: int, dirty: QRect
) -> Iterator[tuple[int, float]]:
    pitch = scene.camera.pitch / ratio
    interval = _nice_step(scaled(_LABEL_SPACING) / pitch)
    section_top = scene.camera.y / ratio + section.first_row * pitch
    first = max(0, int((dirty.y() - height - section_top) / pitch))
    for row in range(first - first % interval, -(-section.size // scene.grid.columns), interval):
        y = section_top + row * pitch
        if y > dirty.bottom() + height:
            return
        if y + pitch > 0:
            yield row, y


def draw_block_numbers(painter: QPainter, scene: Scene, gutter: int, ratio: float) -> None:
    pitch = scene.camera.pitch / ratio
    if pitch < scaled(_MIN_PITCH_FOR_NUMBERS) or scene.cells is None:
        return
    rows, columns = _visible(scene)
    for row in rows:
        for column in columns:
            if (block := scene.grid.block_at(row, column)) is not None:
                x, y = scene.camera.corner_of(row, column)
                box = QRectF(x / ratio + gutter, y / ratio, pitch, pitch)
                painter.setPen(_text_color_at(scene, x + scene.camera.pitch / 2, y + scene.camera.pitch / 2))
                number = block - scene.grid.section_of(block).start  # slots of a tier count from 0
                painter.drawText(box, Qt.AlignmentFlag.AlignCenter, str(number))


def _text_color_at(scene: Scene, x: float, y: float) -> QColor:
    index = (min(max(0, int(y)), scene.height - 1), min(max(0, int(x)), scene.width - 1))
    color = QColor.fromRgb(int(scene.pixels[index]))
    is_light = 0.299 * color.red() + 0.587 * color.green() + 0.114 * color.blue() > 120
    return QColor("#0d0f13" if is_light else "#e6e9ef")


def _visible(scene: Scene) -> tuple[range, range]:
    top, left = scene.camera.cell_at(0, 0)
    bottom, right = scene.camera.cell_at(scene.width, scene.height)
    return range(max(0, top), bottom + 1), range(max(0, left), right + 1)


def _nice_step(minimum: float) -> int:
    """Return the smallest of 1, 2, 4, 5, 10, 20, 40, 50, ... that is at least `minimum`."""
    step = 1
    while True:
        for factor in (1, 2, 4, 5):
            if step * factor >= minimum:
                return step * factor
        step *= 10
