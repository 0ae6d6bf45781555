"""Remembers where a comparison window stood, how large it was, and how its parts shared it. Does not know what it
compares.
"""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QByteArray, QSettings
from PySide6.QtWidgets import QMainWindow, QSplitter

from kvscope_app.setting_names import geometry_name, splitter_name

KIND: Final = "comparison"
"""Of its place among the windows; see `window_slots`."""


def save_place(window: QMainWindow, settings: QSettings, group: str) -> None:
    """Remember the window's place, so that the next window of this `group` opens there."""
    settings.setValue(geometry_name(group), window.saveGeometry())
    for splitter in window.findChildren(QSplitter):
        if splitter.objectName():
            settings.setValue(splitter_name(group, splitter.objectName()), splitter.saveState())


def restore_place(window: QMainWindow, settings: QSettings, group: str) -> None:
    """Restore the remembered place; what is not remembered stays as it is."""
    geometry = settings.value(geometry_name(group))
    if isinstance(geometry, QByteArray):
        window.restoreGeometry(geometry)
    for splitter in window.findChildren(QSplitter):
        state = settings.value(splitter_name(group, splitter.objectName())) if splitter.objectName() else None
        if isinstance(state, QByteArray):
            splitter.restoreState(state)
