"""Test of the line width of curves."""

from __future__ import annotations

import numpy as np
import pyqtgraph as pg
import pytest
from PySide6.QtCore import QPoint
from PySide6.QtGui import QColor, QImage, QPainter
from PySide6.QtWidgets import QWidget

from kvscope_app.views.chart.panel import CurveItem


@pytest.mark.parametrize("scale", [1, 2, 3])
def test_line_width_scales_with_the_picture(qtbot, scale):
    room, plot = QWidget(), pg.GraphicsView()
    qtbot.addWidget(room)
    room.resize(200, 150)
    plot.setParent(room)
    plot.resize(200, 150)
    box = pg.ViewBox()
    plot.setCentralItem(box)
    curve = CurveItem(np.array([0.0, 1.0]), np.array([0.5, 0.5]), pen=pg.mkPen(QColor(255, 0, 0), width=1))
    box.addItem(curve)
    box.setRange(xRange=(0, 1), yRange=(0, 1))
    room.show()
    image = QImage(room.size() * scale, QImage.Format.Format_RGB32)
    painter = QPainter(image)
    painter.scale(scale, scale)
    room.render(painter, QPoint())
    painter.end()
    column = image.width() // 2
    red = sum(image.pixelColor(column, y).red() > 200 for y in range(image.height()))
    assert red == scale
    assert curve.opts["pen"].widthF() == 1
