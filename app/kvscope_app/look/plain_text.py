"""Text that is shown as it is. Names, reasons and prompts come from engines and models: none of it is ever markup."""

from __future__ import annotations

from html import escape

from PySide6.QtCore import Qt
from PySide6.QtGui import Qt as QtGuiTexts
from PySide6.QtWidgets import QLabel, QWidget


class PlainLabel(QLabel):
    """A label that takes `<b>` for three letters in two brackets; Qt's own guesses."""

    def __init__(self, text: str = "", parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setText(text)


def plain_tip(text: str) -> str:
    """What a tooltip is given to show `text` as it is: tooltips guess as well, and cannot be told not to."""
    if not QtGuiTexts.mightBeRichText(text):
        return text
    return f"<p style='white-space: pre-wrap'>{escape(text)}</p>"
