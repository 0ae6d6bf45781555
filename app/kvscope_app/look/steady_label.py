"""A label for words that change all the time. It keeps its size while they fit, or the whole window, with all its
docks, would be laid out anew for each digit."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QEvent, QSize
from PySide6.QtWidgets import QWidget

from kvscope_app.look.plain_text import PlainLabel

_TOO_WIDE: Final = 1.5
"""Shorter words get a smaller label once it is so many times as wide as they need."""
_SLACK: Final = 2
"""Letters may lean out of their width."""


class SteadyLabel(PlainLabel):
    """As wide as the widest text of late, and never narrower than `longest`."""

    def __init__(self, longest: str = "", parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self._longest = longest

    def setText(self, text: str) -> None:
        if text != self.text():
            super().setText(text)  # while the size is fixed nobody is told that it might change
            self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.StyleChange) and self._is_fixed:
            self._fit(anew=True)

    @property
    def _is_fixed(self) -> bool:
        return self.minimumSize() == self.maximumSize()

    def _fit(self, *, anew: bool = False) -> None:
        needed, room = self._needed(), self.maximumSize()
        if anew or not (needed.width() <= room.width() <= _TOO_WIDE * needed.width()):
            self.setFixedSize(needed)

    def _needed(self) -> QSize:
        """Of the text: what Qt proposes is never less than the size that was fixed."""
        self.ensurePolished()
        metrics, margins = self.fontMetrics(), self.contentsMargins()
        text = self.text() if len(self.text()) > len(self._longest) else self._longest
        width = metrics.horizontalAdvance(text)
        beside, above = margins.left() + margins.right(), margins.top() + margins.bottom()
        return QSize(width + beside + _SLACK, metrics.height() + above)
