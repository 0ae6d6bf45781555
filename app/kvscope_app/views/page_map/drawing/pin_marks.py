"""Corner mark of pinned blocks, visible in every colour mode and without colour vision."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QPointF
from PySide6.QtGui import QPainter, QPen, QPolygonF

from kvscope_app.ui.theme import Theme
from kvscope_app.views.page_map.drawing.scene import Scene

_MIN_PITCH: Final = 6.0
_PITCH_SHARE: Final = 0.42
_MAX_SIZE: Final = 14.0


def draw_pins(painter: QPainter, scene: Scene, pinned: frozenset[int], theme: Theme, gutter: int, ratio: float) -> None:
    pitch = scene.camera.pitch / ratio
    if not pinned or pitch < _MIN_PITCH or scene.cells is None:
        return
    size, inset = min(pitch * _PITCH_SHARE, _MAX_SIZE), max(0.5, pitch * 0.04)
    for block in pinned:
        if block < scene.grid.num_blocks:
            x, y = scene.camera.corner_of(*scene.grid.position_of(block))
            draw_corner(painter, theme, x / ratio + gutter + pitch - 2 * inset, y / ratio + inset, size)


def draw_corner(painter: QPainter, theme: Theme, right: float, top: float, size: float) -> None:
    """Draw a pin's corner mark with its upper right point at (right, top)."""
    painter.setPen(QPen(theme.color("base"), 1))
    painter.setBrush(theme.color("text"))
    painter.drawPolygon(QPolygonF((QPointF(right - size, top), QPointF(right, top), QPointF(right, top + size))))
