"""Label for frequently changing text that keeps its size while the text fits.

Otherwise each new digit would cause a layout of the whole window with all its docks.
"""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QEvent, QSize
from PySide6.QtWidgets import QWidget

from kvscope_app.ui.plain_text import PlainLabel

_TOO_WIDE: Final = 1.5
"""Ratio of the label's width to the needed width above which the label shrinks."""
_SLACK: Final = 2
"""Extra pixels, because glyphs may extend beyond their advance width."""


class SteadyLabel(PlainLabel):
    """Label as wide as its recent texts, and never narrower than `longest`."""

    def __init__(self, longest: str = "", parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self._longest = longest

    def setText(self, text: str) -> None:
        if text != self.text():
            super().setText(text)  # causes no layout while the size is fixed
            self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.StyleChange) and self._is_fixed:
            self._fit(force=True)

    @property
    def _is_fixed(self) -> bool:
        return self.minimumSize() == self.maximumSize()

    def _fit(self, *, force: bool = False) -> None:
        needed, room = self._needed(), self.maximumSize()
        if force or not (needed.width() <= room.width() <= _TOO_WIDE * needed.width()):
            self.setFixedSize(needed)

    def _needed(self) -> QSize:
        """Return the size of the text. Qt's size hint is never smaller than the fixed size."""
        self.ensurePolished()
        metrics, margins = self.fontMetrics(), self.contentsMargins()
        text = self.text() if len(self.text()) > len(self._longest) else self._longest
        width = metrics.horizontalAdvance(text)
        beside, above = margins.left() + margins.right(), margins.top() + margins.bottom()
        return QSize(width + beside + _SLACK, metrics.height() + above)
