"""Determines whether a widget may be visible to the user.

Qt's `isVisible` is also true in a minimised window, and for a dock behind another tab. Qt does not hide such a dock but
moves it outside its window.
"""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QPoint, QRect, QSize
from PySide6.QtWidgets import QWidget

_MIN_SIZE: Final = QSize(1, 1)
"""Size assumed for a widget that has a position but no size yet."""


def is_on_screen(widget: QWidget) -> bool:
    """Whether any part of `widget` may be on a screen. Windows that cover it are not considered."""
    window = widget.window()
    if not widget.isVisible() or window.isMinimized():
        return False
    area = QRect(widget.mapTo(window, QPoint()), widget.size().expandedTo(_MIN_SIZE))
    return widget is window or window.rect().intersects(area)
