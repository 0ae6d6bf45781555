"""Text of one message, as tall as it is: plain while it is being written, Markdown once it is whole."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QSizeF, Qt, QUrl
from PySide6.QtGui import QDesktopServices, QTextCursor, QTextDocument, QTextOption, QWheelEvent
from PySide6.QtWidgets import QFrame, QSizePolicy, QTextBrowser


class TextBody(QTextBrowser):
    """No scroll bars of its own: the transcript scrolls."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.setAccessibleName(name)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setProperty("look", "bare")
        self.setStyleSheet("QTextBrowser { background: transparent; border: none; padding: 0; }")
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setWordWrapMode(QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setOpenLinks(False)
        self.setUndoRedoEnabled(False)
        self.setTabChangesFocus(True)
        self.document().setDocumentMargin(0)
        self.document().documentLayout().documentSizeChanged.connect(self._fit)
        self.anchorClicked.connect(_open_web_link)

    def show_plain(self, text: str) -> None:
        """Text as it is."""
        self.setPlainText(text)

    def show_markdown(self, text: str) -> None:
        """GitHub's Markdown; HTML in it stays text."""
        features = QTextDocument.MarkdownFeature
        self.document().setMarkdown(text, features.MarkdownDialectGitHub | features.MarkdownNoHTML)
        self._let_code_wrap()

    def add(self, text: str) -> None:
        """More text at the end."""
        cursor = QTextCursor(self.document())
        cursor.movePosition(QTextCursor.MoveOperation.End)
        cursor.insertText(text)

    def loadResource(self, kind: int, name: QUrl | str) -> Any:
        """A model's text loads nothing, neither files nor pages."""
        return None

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()

    def _let_code_wrap(self) -> None:
        """There is no bar to scroll sideways with: a line of code that is too long goes on below."""
        block = self.document().begin()
        while block.isValid():
            if block.blockFormat().nonBreakableLines():
                wrapping = block.blockFormat()
                wrapping.setNonBreakableLines(False)
                QTextCursor(block).setBlockFormat(wrapping)
            block = block.next()

    def _fit(self, size: QSizeF) -> None:
        self.setFixedHeight(max(round(size.height() + 0.5), self.fontMetrics().height()))


def _open_web_link(url: QUrl) -> None:
    if url.scheme() in ("http", "https"):
        QDesktopServices.openUrl(url)
