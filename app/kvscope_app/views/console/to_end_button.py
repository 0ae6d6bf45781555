"""Button that floats at the bottom of the transcript while the user has scrolled up."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QAbstractScrollArea, QToolButton

from kvscope_app.ui.theme import Theme

_TEXT: Final = "↓  To the end"
_NEW_TEXT: Final = "↓  New text"
_MARGIN: Final = 10


class ToEndButton(QToolButton):
    def __init__(self, area: QAbstractScrollArea) -> None:
        super().__init__(area)
        self._area = area
        self.setToolTip("Scroll to the newest text (End)")
        self.setAccessibleName("To the end")
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.setText(_TEXT)
        self.hide()

    def show_position(self, *, is_at_end: bool) -> None:
        """Show the button if the transcript is not scrolled to its end, else hide it."""
        if is_at_end:
            self.setText(_TEXT)
            if self.hasFocus():
                self._area.setFocus()
        self.setVisible(not is_at_end)
        self.place()

    def show_new_text(self) -> None:
        """Report that text has arrived below the visible part."""
        if self.isVisibleTo(self._area) and self.text() != _NEW_TEXT:
            self.setText(_NEW_TEXT)
            self.place()

    def place(self) -> None:
        self.adjustSize()
        view = self._area.viewport().geometry()
        self.move(view.center().x() - self.width() // 2, view.bottom() - self.height() - _MARGIN)
        self.raise_()

    def apply_theme(self, theme: Theme) -> None:
        self.setStyleSheet(
            f"QToolButton {{ background: {theme.raised}; color: {theme.text}; border: 1px solid {theme.border};"
            f" border-radius: 10px; padding: 4px 12px; }} QToolButton:hover, QToolButton:focus"
            f" {{ border-color: {theme.accent}; }}"
        )
        self.place()
