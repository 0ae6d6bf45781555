"""Reports the contents of hand-painted widgets to assistive technology. Costs nothing while none is active."""

from __future__ import annotations

from PySide6.QtGui import QAccessible, QAccessibleAnnouncementEvent
from PySide6.QtWidgets import QWidget


def announce(widget: QWidget, sentence: str) -> None:
    """Set `sentence` as the accessible description of `widget` and have it spoken."""
    widget.setAccessibleDescription(sentence)
    if QAccessible.isActive():
        QAccessible.updateAccessibility(QAccessibleAnnouncementEvent(widget, sentence))


def is_screen_reader_active() -> bool:
    """Whether assistive technology such as a screen reader is active."""
    return bool(QAccessible.isActive())
