"""Tells assistive technology what hand-painted widgets show. Costs nothing while no such technology listens."""

from __future__ import annotations

from PySide6.QtGui import QAccessible, QAccessibleAnnouncementEvent
from PySide6.QtWidgets import QWidget


def announce(widget: QWidget, sentence: str) -> None:
    """Set `sentence` as the description of `widget` and have it spoken."""
    widget.setAccessibleDescription(sentence)
    if QAccessible.isActive():
        QAccessible.updateAccessibility(QAccessibleAnnouncementEvent(widget, sentence))


def is_listened_to() -> bool:
    """Whether a screen reader or the like asked for this process' widgets."""
    return bool(QAccessible.isActive())
