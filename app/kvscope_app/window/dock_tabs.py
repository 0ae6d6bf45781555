"""Tabs of docks that share a place: their names stay whole, however many there are.

Qt makes the bar when docks come together and cuts all names at once to make it fit. Here it is scrolled instead.
"""

from __future__ import annotations

from PySide6.QtCore import QChildEvent, QEvent, Qt
from PySide6.QtWidgets import QTabBar


def keep_names(event: QChildEvent) -> None:
    """For the window's `childEvent`: a bar of tabs that came shows names whole, and arrows where they do not fit."""
    bar = event.child()
    if event.type() is QEvent.Type.ChildPolished and isinstance(bar, QTabBar):
        bar.setElideMode(Qt.TextElideMode.ElideNone)
        bar.setUsesScrollButtons(True)
