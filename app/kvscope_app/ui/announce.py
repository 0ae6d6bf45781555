"""Reports the contents of widgets that paint themselves to assistive technology, such as a screen reader.

Does little if no assistive technology is active.
"""

from __future__ import annotations

from PySide6.QtGui import QAccessible, QAccessibleAnnouncementEvent
from PySide6.QtWidgets import QWidget


def announce(widget: QWidget, sentence: str) -> None:
    """Set the accessible description of `widget` to `sentence`, and have a screen reader speak it."""
    widget.setAccessibleDescription(sentence)
    if QAccessible.isActive():
        QAccessible.updateAccessibility(QAccessibleAnnouncementEvent(widget, sentence))


def is_screen_reader_active() -> bool:
    return bool(QAccessible.isActive())
