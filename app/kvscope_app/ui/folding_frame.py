"""Frame that shows its buttons next to its text, or below the text if the frame is narrow."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QFrame, QLayout, QWidget

from kvscope_app.ui.zoom import scaled

_MIN_TEXT_WIDTH = 400
"""Minimum width in pixels, at 100 % zoom, of the text next to the buttons. In a narrower frame, the buttons are below
it.
"""


class FoldingFrame(QFrame):
    """Frame with a text and buttons. The widget `corner` stays to the right of the text and the buttons."""

    def __init__(self, text_layout: QLayout, buttons: QLayout, corner: QWidget, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._buttons = buttons
        self.row = QBoxLayout(QBoxLayout.Direction.LeftToRight)
        self.row.setSpacing(10)
        self.row.addLayout(text_layout, 1)
        self.row.addLayout(buttons)
        outer = QBoxLayout(QBoxLayout.Direction.LeftToRight, self)
        outer.setContentsMargins(14, 6, 8, 6)
        outer.setSpacing(10)
        outer.addLayout(self.row, 1)
        outer.addWidget(corner, 0, Qt.AlignmentFlag.AlignTop)

    @property
    def is_folded(self) -> bool:
        return self.row.direction() is QBoxLayout.Direction.TopToBottom

    def fold(self) -> None:
        """Move the buttons next to or below the text, depending on the widths of the frame and the buttons."""
        is_narrow = self.width() < self._buttons.sizeHint().width() + scaled(_MIN_TEXT_WIDTH)
        direction = QBoxLayout.Direction.TopToBottom if is_narrow else QBoxLayout.Direction.LeftToRight
        if self.row.direction() is not direction:
            self.row.setDirection(direction)
            self.row.setSpacing(5 if is_narrow else 10)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.fold()
