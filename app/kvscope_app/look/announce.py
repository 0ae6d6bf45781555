"""Telling assistive technology what is painted by hand. Costs nothing while none listens."""

from __future__ import annotations

from PySide6.QtGui import QAccessible, QAccessibleAnnouncementEvent
from PySide6.QtWidgets import QWidget


def announce(widget: QWidget, sentence: str) -> None:
    """Let `sentence` describe `widget`, and have it said now."""
    widget.setAccessibleDescription(sentence)
    if QAccessible.isActive():
        QAccessible.updateAccessibility(QAccessibleAnnouncementEvent(widget, sentence))


def is_listened_to() -> bool:
    """Whether a screen reader or the like asked for this process' widgets."""
    return bool(QAccessible.isActive())
