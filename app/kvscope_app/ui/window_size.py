"""Default size of a window."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QSize
from PySide6.QtWidgets import QMainWindow

DEFAULT_SIZE: Final = QSize(1560, 960)


def resize_to_default(window: QMainWindow) -> None:
    available = window.screen().availableGeometry().size() * 0.94
    window.resize(DEFAULT_SIZE.boundedTo(available))
