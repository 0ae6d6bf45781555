"""Paints bookmarks, alarms and loops on time axes, distinguished by shape as well as colour.

A bookmark is a pennant, an alarm a triangle. The ends of a loop are brackets.
"""

from __future__ import annotations

from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QColor, QPainter, QPen, QPixmap, QPolygonF

from kvscope_app.ui.theme import Theme

WIDTH = 9.0
"""Width of a sign in pixels."""


def sign_color(is_note: bool, theme: Theme) -> QColor:
    return theme.color("accent" if is_note else "warn")


def paint_sign(painter: QPainter, x: float, top: float, height: float, *, is_note: bool, theme: Theme) -> None:
    """Paint a bookmark (`is_note`) or an alarm, centred at `x`, with its upper edge at `top`."""
    half = WIDTH / 2
    if is_note:
        points = [(-half, 0), (half, 0), (half, height), (0, height * 0.66), (-half, height)]
    else:
        points = [(0, 0), (half + 0.5, height), (-half - 0.5, height)]
    painter.save()
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.setPen(QPen(theme.color("base"), 1))
    painter.setBrush(sign_color(is_note, theme))
    painter.drawPolygon(QPolygonF([QPointF(x + dx, top + dy) for dx, dy in points]))
    painter.restore()


def paint_loop(painter: QPainter, left: float | None, right: float | None, box: QRectF, theme: Theme) -> None:
    """Paint the loop from `left` to `right` within `box`. If one of them is None, only the other end is painted."""
    color = theme.color("accent")
    painter.save()
    if left is not None and right is not None:
        inside = QRectF(left, box.top(), right - left, box.height()).intersected(box)
        painter.fillRect(inside, theme.color("accent", 46))
    painter.setPen(QPen(color, 2))
    for x, sign in ((left, 1), (right, -1)):
        if x is not None and box.left() - 1 <= x <= box.right() + 1:
            painter.drawLine(QPointF(x, box.top()), QPointF(x, box.bottom()))
            for y in (box.top() + 1, box.bottom() - 1):
                painter.drawLine(QPointF(x, y), QPointF(x + 4 * sign, y))
    painter.restore()


def sign_pixmap(*, is_note: bool, theme: Theme, scale: float = 2.0) -> QPixmap:
    pixmap = QPixmap(round(14 * scale), round(14 * scale))
    pixmap.setDevicePixelRatio(scale)
    pixmap.fill(Qt.GlobalColor.transparent)
    painter = QPainter(pixmap)
    paint_sign(painter, 7, 2, 10, is_note=is_note, theme=theme)
    painter.end()
    return pixmap
