"""Widgets that mean something by keys of the window while they have the focus, and show that they have it."""

from __future__ import annotations

from collections.abc import Collection

from PySide6.QtCore import QEvent, QRect, Qt
from PySide6.QtGui import QKeyEvent, QPainter, QPen

from kvscope_app.look.theme import Theme

_PLAIN = (Qt.KeyboardModifier.NoModifier, Qt.KeyboardModifier.KeypadModifier, Qt.KeyboardModifier.ShiftModifier)


def is_own_key(event: QEvent, keys: Collection[Qt.Key]) -> bool:
    """Whether Qt asks about one of `keys`, pressed without Ctrl or Alt: accept the event, and it is no shortcut."""
    if event.type() != QEvent.Type.ShortcutOverride or not isinstance(event, QKeyEvent):
        return False
    return event.modifiers() in _PLAIN and event.key() in keys


def draw_focus(painter: QPainter, around: QRect, theme: Theme) -> None:
    """The frame of what has the focus."""
    painter.setBrush(Qt.BrushStyle.NoBrush)
    painter.setPen(QPen(theme.color("accent"), 1))
    painter.drawRect(around.adjusted(0, 0, -1, -1))
