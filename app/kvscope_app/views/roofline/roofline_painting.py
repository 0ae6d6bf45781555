"""Paints the parts of a roofline: grid, roofs and points. Imports no widget."""

from __future__ import annotations

from typing import Final

import numpy as np
from PySide6.QtCore import QLineF, QPointF, QRectF, Qt
from PySide6.QtGui import QPainter, QPen, QPolygonF

from kvscope_app.ui.fonts import sans
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.roofline.log_scale import LogScale, tick_text, with_prefix
from kvscope_app.views.roofline.point_text import KIND_COLORS
from kvscope_app.views.roofline.points import PointKind, RooflinePoints
from kvscope_telemetry.messages.telemetry import DeviceInfo

_FONT_SCALE: Final = 0.86
_DOT: Final = 6
_CELL_PX: Final = 2
"""Size in pixels of the grid cells in which points of one kind are merged into one dot."""


def grid(painter: QPainter, box: QRectF, across: LogScale, up: LogScale, theme: Theme) -> None:
    painter.setFont(sans(_FONT_SCALE))
    height = painter.fontMetrics().height()
    for value in across.ticks():
        x = across.position_of(value)
        painter.setPen(theme.color("grid"))
        painter.drawLine(QLineF(x, box.top(), x, box.bottom()))
        painter.setPen(theme.color("muted"))
        text_box = QRectF(x - 40, box.bottom() + 2, 80, height)
        painter.drawText(text_box, Qt.AlignmentFlag.AlignHCenter, tick_text(value, ""))
    for value in up.ticks():
        y = up.position_of(value)
        painter.setPen(theme.color("grid"))
        painter.drawLine(QLineF(box.left(), y, box.right(), y))
        painter.setPen(theme.color("muted"))
        text_box = QRectF(0, y - height / 2, box.left() - 6, height)
        painter.drawText(
            text_box, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, tick_text(value, "FLOP/s")
        )
    title_box = QRectF(box.left(), box.bottom() + height + 1, box.width(), height)
    painter.drawText(title_box, Qt.AlignmentFlag.AlignHCenter, "FLOP/byte")


def roofs(painter: QPainter, box: QRectF, across: LogScale, up: LogScale, device: DeviceInfo, theme: Theme) -> None:
    read, flops = device.read_bytes_per_s, device.flops_per_s
    if not read and not flops:
        return
    painter.save()
    painter.setClipRect(box)
    painter.setPen(QPen(theme.color("muted"), 2))
    ridge = flops / read if read and flops else across.high if read else across.low
    low, high = across.low, across.high
    if read:
        ends = [QPointF(across.position_of(at), up.position_of(at * read)) for at in (low, min(ridge, high))]
        painter.drawPolyline(QPolygonF(ends))
    if flops:
        y = up.position_of(flops)
        painter.drawLine(QLineF(across.position_of(max(ridge, low)), y, box.right(), y))
    painter.setFont(sans(_FONT_SCALE))
    painter.setPen(theme.color("text"))
    if flops:
        height = painter.fontMetrics().height()
        text_box = QRectF(box.left(), max(up.position_of(flops) - height - 2, box.top()), box.width() - 4, height)
        painter.drawText(text_box, Qt.AlignmentFlag.AlignRight, with_prefix(flops, "FLOP/s"))
    if read:
        _draw_slanted_label(painter, box, across, up, read)
    painter.restore()


def _draw_slanted_label(painter: QPainter, box: QRectF, across: LogScale, up: LogScale, read: int) -> None:
    slope = (up.position_of(across.low * read * 10) - up.position_of(across.low * read)) / (
        across.position_of(across.low * 10) - box.left()
    )
    angle = float(np.degrees(np.arctan(slope)))
    start = max(across.low, up.low / read)
    painter.save()
    painter.translate(across.position_of(start), up.position_of(start * read))
    painter.rotate(angle)
    text, metrics = with_prefix(read, "B/s"), painter.fontMetrics()
    fits_above = (
        up.position_of(start * read) - box.top() > metrics.horizontalAdvance(text) * abs(slope) + 2 * metrics.height()
    )
    offset = -scaled(5) if fits_above else scaled(3) + metrics.ascent()
    painter.drawText(QPointF(scaled(14), offset), text)
    painter.restore()


def points(painter: QPainter, step_points: RooflinePoints, across: LogScale, up: LogScale, theme: Theme) -> None:
    if not len(step_points):
        return
    x, y = across.positions_of(step_points.intensity), up.positions_of(step_points.flops_per_s)
    size = scaled(_DOT)
    painter.setPen(Qt.PenStyle.NoPen)
    for kind in sorted(PointKind, key=lambda kind: -int(np.count_nonzero(step_points.kind == kind))):
        is_kind = step_points.kind == kind
        cells = np.unique(np.stack((x[is_kind], y[is_kind])) // _CELL_PX, axis=1) * _CELL_PX
        painter.setBrush(theme.color(KIND_COLORS[kind], 190))
        for left, top in cells.T.tolist():
            if kind is PointKind.DECODE:
                painter.drawEllipse(QRectF(left - size / 2, top - size / 2, size, size))
            elif kind is PointKind.PREFILL:
                painter.drawRect(QRectF(left - size / 2, top - size / 2, size, size))
            else:
                painter.drawPolygon(QPolygonF(_diamond(left, top, size * 0.7)))


def _diamond(x: float, y: float, reach: float) -> list[QPointF]:
    return [QPointF(x, y - reach), QPointF(x + reach, y), QPointF(x, y + reach), QPointF(x - reach, y)]
