"""Whether a person may see a widget. Qt's `isVisible` is true also in a minimised window, and for a dock behind another
tab, which Qt moves outside its window.
"""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QPoint, QRect, QSize
from PySide6.QtWidgets import QWidget

_SMALLEST: Final = QSize(1, 1)
"""One that has no size yet is where it is all the same."""


def in_sight(widget: QWidget) -> bool:
    """Whether anything of `widget` may be on a screen. Other windows over it are not known of."""
    window = widget.window()
    if not widget.isVisible() or window.isMinimized():
        return False
    place = QRect(widget.mapTo(window, QPoint()), widget.size().expandedTo(_SMALLEST))
    return widget is window or window.rect().intersects(place)
