"""Saves and restores the geometry and splitter sizes of a comparison window."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QByteArray, QSettings
from PySide6.QtWidgets import QMainWindow, QSplitter

from kvscope_app.setting_names import geometry_name, splitter_name

COMPARISON_WINDOW: Final = "comparison"


def save_geometry(window: QMainWindow, settings: QSettings, group: str) -> None:
    settings.setValue(geometry_name(group), window.saveGeometry())
    for splitter in window.findChildren(QSplitter):
        if splitter.objectName():
            settings.setValue(splitter_name(group, splitter.objectName()), splitter.saveState())


def restore_geometry(window: QMainWindow, settings: QSettings, group: str) -> None:
    geometry = settings.value(geometry_name(group))
    if isinstance(geometry, QByteArray):
        window.restoreGeometry(geometry)
    for splitter in window.findChildren(QSplitter):
        state = settings.value(splitter_name(group, splitter.objectName())) if splitter.objectName() else None
        if isinstance(state, QByteArray):
            splitter.restoreState(state)
