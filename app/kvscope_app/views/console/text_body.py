"""Text of one message at full height: a prompt as plain text, an answer as Markdown, also while it grows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from PySide6.QtCore import QEvent, QSizeF, Qt, QUrl
from PySide6.QtGui import (
    QColor,
    QDesktopServices,
    QKeyEvent,
    QPainter,
    QPaintEvent,
    QResizeEvent,
    QTextCharFormat,
    QTextCursor,
    QTextOption,
    QWheelEvent,
)
from PySide6.QtWidgets import QFrame, QSizePolicy, QTextBrowser, QTextEdit

from kvscope_app.ui.theme import Theme
from kvscope_app.views.console.code_frames import CodeFrames
from kvscope_app.views.console.streamed_markdown import StreamedMarkdown

_REASONING: Final = re.compile(r"\s*<think>\s*(.*?)\s*(?:</think>\s*(.*))?", re.DOTALL)
_THINK_END: Final = re.compile(r"(.*?)\n</think>\s*(.*)", re.DOTALL)
"""Pattern for reasoning that ends in `</think>` without a `<think>` before it, which was part of the chat template."""
_START_TAG: Final = "<think>"
_END_TAG: Final = "</think>"
_SCROLL_KEYS: Final = frozenset(
    (Qt.Key.Key_Up, Qt.Key.Key_Down, Qt.Key.Key_PageUp, Qt.Key.Key_PageDown, Qt.Key.Key_Home, Qt.Key.Key_End)
)


class TextBody(QTextBrowser):
    """Text widget without scroll bars, inside the scrolling transcript."""

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
        self.document().documentLayout().documentSizeChanged.connect(self._adjust_height)
        self.anchorClicked.connect(_open_web_link)
        self._frames = CodeFrames(self.document(), self.viewport())
        self._markdown = StreamedMarkdown(self.document(), self._frames)
        self._plain = ""
        """Plain text that is shown; empty while Markdown is shown."""

    @property
    def is_empty(self) -> bool:
        return self.document().isEmpty()

    def show_plain(self, text: str) -> None:
        """Show plain text. If it extends the shown text, only the new part is inserted."""
        if self._plain and text.startswith(self._plain):
            cursor = QTextCursor(self.document())
            cursor.movePosition(QTextCursor.MoveOperation.End)
            cursor.insertText(text[len(self._plain) :])
        else:
            self.setPlainText(text)
        self._plain = text

    def show_markdown(self, text: str, *, is_complete: bool = True) -> None:
        """Show Markdown. If `text` extends the shown text, only its end is rendered, and a selection is kept.

        `is_complete` is False while more text is expected.
        """
        if self._plain:
            self._plain = ""
            self._markdown.reset()
        selected = self.textCursor()
        anchor, position = selected.anchor(), selected.position()
        self._markdown.show(text.replace("\r\n", "\n").replace("\r", "\n"), is_complete=is_complete)
        cursor = self.textCursor()
        if (cursor.anchor(), cursor.position()) != (anchor, position):
            end = self.document().characterCount() - 1
            cursor.setPosition(min(anchor, end))
            cursor.setPosition(min(position, end), QTextCursor.MoveMode.KeepAnchor)
            self.setTextCursor(cursor)
        self._frames.place_headers()

    def source_offset(self, position: int) -> int | None:
        """Return the offset in the Markdown text of the character at a position in the document, or None if it is not
        in the text.
        """
        return None if self._plain else self._markdown.source_offset(position)

    def underline(self, ranges: Sequence[tuple[int, int]], color: QColor) -> None:
        """Underline parts of a complete Markdown text, given as (start, end) in it, instead of earlier ones."""
        selections = []
        for start, end in self._markdown.document_ranges(ranges):
            selection = QTextEdit.ExtraSelection()
            selection.cursor = QTextCursor(self.document())
            selection.cursor.setPosition(start)
            selection.cursor.setPosition(end, QTextCursor.MoveMode.KeepAnchor)
            selection.format.setUnderlineStyle(QTextCharFormat.UnderlineStyle.DotLine)
            selection.format.setUnderlineColor(color)
            selections.append(selection)
        self.setExtraSelections(selections)

    def apply_theme(self, theme: Theme) -> None:
        self._frames.apply_theme(theme)
        self.viewport().update()

    def loadResource(self, kind: int, name: QUrl | str) -> Any:
        """Load nothing: text from a model must not open files or pages."""
        return None

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Leave the keys that scroll to the transcript."""
        if event.key() in _SCROLL_KEYS and event.modifiers() == Qt.KeyboardModifier.NoModifier:
            event.ignore()
        else:
            super().keyPressEvent(event)

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() is QEvent.Type.FontChange:
            self._frames.format_all()
            self._frames.place_headers(is_new_layout=True)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if event.size().width() != event.oldSize().width():
            self._frames.place_headers(is_new_layout=True)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self.viewport())
        self._frames.paint(painter, event.rect())
        painter.end()
        super().paintEvent(event)

    def _adjust_height(self, size: QSizeF) -> None:
        self.setFixedHeight(max(round(size.height() + 0.5), self.fontMetrics().height()))


def split_reasoning(text: str, *, is_complete: bool = True) -> tuple[str, str]:
    """Return (reasoning between `<think>` tags at the start of `text`, remaining answer). Both may be empty.

    Unless `is_complete`, more text is expected, and a tag of which only the beginning has arrived is left out.
    """
    if not is_complete:
        text = _unfinished_tag_removed(text)
    match = _REASONING.fullmatch(text) or _THINK_END.fullmatch(text)
    return ("", text) if match is None else (match[1].strip(), match[2] or "")


def _unfinished_tag_removed(text: str) -> str:
    start = text.rfind("<", max(0, len(text) - len(_END_TAG)))
    tag = text[start:] if start >= 0 else ""
    if not tag or tag in (_START_TAG, _END_TAG):
        return text
    if _START_TAG.startswith(tag) and not text[:start].strip():
        return ""
    return text[:start] if _END_TAG.startswith(tag) else text


def _open_web_link(url: QUrl) -> None:
    if url.scheme() in ("http", "https"):
        QDesktopServices.openUrl(url)
