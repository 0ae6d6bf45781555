"""Scales text, and lengths that depend on it, by the user's zoom.

Qt scales widgets that inherit the application's font. This module scales the rest: widgets with their own font, icons,
fixed sizes, rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QFont
from PySide6.QtWidgets import QAbstractButton, QAbstractItemView, QApplication, QTableView, QWidget

_POINTS: Final = "points_at_100"
_PERCENT: Final = "zoom_percent"
_SCALE: Final = "font_scale"
"""Qt property of a widget with its own font: the size of that font relative to the application's font."""
_AT_100: Final = "length_at_100"
"""Prefix of the Qt property that stores a length of a widget. The length's name follows.

Its value is the exact length at 100 % and the rounded length that was set last. Scaling rounded lengths again would
make them drift after a few zoom steps.
"""
_MAX_WIDGET_SIZE: Final = (1 << 24) - 1
"""Maximum size of a widget without a size limit (Qt's QWIDGETSIZE_MAX)."""


def zoom_of(app: QApplication) -> int:
    return int(app.property(_PERCENT) or 100)


def scaled(length: int) -> int:
    """Scale a length in device-independent pixels by the current zoom."""
    app = QApplication.instance()
    return length if not isinstance(app, QApplication) else round(length * zoom_of(app) / 100)


def apply_zoom(app: QApplication, percent: int) -> None:
    """Scale all existing and future widgets to `percent`. The caller must set the stylesheet again afterwards."""
    old_percent = zoom_of(app)
    font = QFont(app.font())
    points = float(app.property(_POINTS) or font.pointSizeF())
    app.setProperty(_POINTS, points)
    app.setProperty(_PERCENT, percent)
    if percent == old_percent:
        return
    for widget in app.allWidgets():
        if widget.testAttribute(Qt.WidgetAttribute.WA_SetFont) and widget.property(_SCALE) is None:
            widget.setProperty(_SCALE, widget.font().pointSizeF() / font.pointSizeF())
        _scale(widget, old_percent, percent)
    font.setPointSizeF(points * percent / 100)
    app.setFont(font)


def restore_own_font(app: QApplication, widget: QWidget) -> None:
    """Restore the size of a widget's own font. Setting a stylesheet resets it to the size that the font had at
    first.
    """
    scale = widget.property(_SCALE)
    if scale is not None:
        font = QFont(widget.font())
        font.setPointSizeF(app.font().pointSizeF() * float(scale))
        widget.setFont(font)


def _scale(widget: QWidget, old_percent: int, percent: int) -> None:
    def rescaled(name: str, length: int) -> int:
        saved = widget.property(f"{_AT_100} {name}")
        at_100, rounded = saved if saved is not None else (0.0, -1)
        if length != rounded:  # the widget or the user changed it meanwhile
            at_100 = length * 100 / old_percent
        new_length = round(at_100 * percent / 100)
        widget.setProperty(f"{_AT_100} {name}", [at_100, new_length])
        return new_length

    if isinstance(widget, QAbstractButton | QAbstractItemView):
        icon = widget.iconSize()
        if icon.isValid():  # invalid: set by the stylesheet
            widget.setIconSize(QSize(rescaled("icon width", icon.width()), rescaled("icon height", icon.height())))
    if isinstance(widget, QTableView):
        _scale_table(widget, rescaled)
    min_size, max_size = widget.minimumSize(), widget.maximumSize()
    if min_size.width() == max_size.width() and 0 < min_size.width() < _MAX_WIDGET_SIZE:
        widget.setFixedWidth(rescaled("width", min_size.width()))
    if min_size.height() == max_size.height() and 0 < min_size.height() < _MAX_WIDGET_SIZE:
        widget.setFixedHeight(rescaled("height", min_size.height()))


def _scale_table(table: QTableView, rescaled: Callable[[str, int], int]) -> None:
    rows = table.verticalHeader()
    height = rows.defaultSectionSize()
    rows.setMinimumSectionSize(1)  # the default minimum is based on the previous font
    rows.setDefaultSectionSize(rescaled("row", height))
    header = table.horizontalHeader()
    for column in range(header.count()):
        is_stretched = header.stretchLastSection() and header.visualIndex(column) == header.count() - 1
        if not is_stretched:  # a stretched column would keep the width
            table.setColumnWidth(column, rescaled(f"column {column}", table.columnWidth(column)))
