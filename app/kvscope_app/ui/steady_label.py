"""Label for frequently changing text that keeps its size while the text fits.

If its size followed the text, each new digit would cause a layout of the whole window with all its docks.
"""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QEvent, QSize
from PySide6.QtWidgets import QWidget

from kvscope_app.ui.plain_text import PlainLabel

_MAX_WIDTH_RATIO: Final = 1.5
"""Maximum ratio of the label's width to the width of its text. Above it, the label shrinks."""
_SLACK_PX: Final = 2
"""Extra pixels of the label's width, because glyphs may extend beyond their advance width."""


class SteadyLabel(PlainLabel):
    """Label that grows with its text, shrinks only if it is far too wide, and always has space for `longest`."""

    def __init__(self, longest: str = "", parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self._longest = longest

    def setText(self, text: str) -> None:
        if text != self.text():
            super().setText(text)  # causes no layout while the size is fixed
            self._update_size()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.StyleChange) and self._is_fixed:
            self._update_size(force=True)

    @property
    def _is_fixed(self) -> bool:
        return self.minimumSize() == self.maximumSize()

    def _update_size(self, *, force: bool = False) -> None:
        needed, current = self._text_size(), self.maximumSize()
        if force or not (needed.width() <= current.width() <= _MAX_WIDTH_RATIO * needed.width()):
            self.setFixedSize(needed)

    def _text_size(self) -> QSize:
        """Return the size of the text, computed from the font, because Qt's size hint is never smaller than the
        label's fixed size.
        """
        self.ensurePolished()
        metrics, margins = self.fontMetrics(), self.contentsMargins()
        text = self.text() if len(self.text()) > len(self._longest) else self._longest
        width = metrics.horizontalAdvance(text)
        extra_width, extra_height = margins.left() + margins.right(), margins.top() + margins.bottom()
        return QSize(width + extra_width + _SLACK_PX, metrics.height() + extra_height)
