"""Labels and tooltips that show text literally: names, reasons and prompts from engines and models are never markup."""

from __future__ import annotations

from html import escape

from PySide6.QtCore import Qt
from PySide6.QtGui import Qt as QtGuiTexts
from PySide6.QtWidgets import QLabel, QWidget


class PlainLabel(QLabel):
    """Label that shows `<b>` literally. A QLabel would guess whether its text is rich text."""

    def __init__(self, text: str = "", parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setText(text)


def plain_tip(text: str) -> str:
    """Return a tooltip text that Qt shows as `text` literally. Qt guesses the format of tooltips."""
    if not QtGuiTexts.mightBeRichText(text):
        return text
    return f"<p style='white-space: pre-wrap'>{escape(text)}</p>"
