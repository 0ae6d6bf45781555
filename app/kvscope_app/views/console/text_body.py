"""Text of one message at full height: plain while it is being written, Markdown once it is complete."""

from __future__ import annotations

import re
from typing import Any, Final

from PySide6.QtCore import QSizeF, Qt, QUrl
from PySide6.QtGui import QDesktopServices, QTextCursor, QTextDocument, QTextOption, QWheelEvent
from PySide6.QtWidgets import QFrame, QSizePolicy, QTextBrowser

_REASONING: Final = re.compile(r"\s*<think>\s*(.*?)\s*(?:</think>\s*(.*))?", re.DOTALL)
_THINK_END: Final = re.compile(r"(.*?)\n</think>\s*(.*)", re.DOTALL)
"""Matches reasoning whose opening tag was part of the chat template."""
_MARKDOWN_PARTS: Final = re.compile(  # quantifiers are bounded, so that the time is linear in the length of any text
    r"""
    (?P<code>^[ ]{0,3}(?P<fence>`{3,}|~{3,})[^\n]*\n.*?(?:^[ ]{0,3}(?P=fence)[^\n]*(?:\n|\Z)|\Z)
      |(?<!`)(?P<ticks>`+)(?!`).{1,2000}?(?<!`)(?P=ticks)(?!`))
    |(?P<math>\\\(.{1,500}?\\\)|\\\[.{1,2000}?\\\]|\$\$.{1,2000}?\$\$|(?<![\\$\w])\$(?![\s$])[^$\n]+(?<!\s)\$(?![\w$]))
    |!\[(?P<alt>[^\]\n]{0,500})\]\((?P<address>[^)\s]{0,500})(?:[ \t][^)\n]{0,500})?\)
    |(?<=\S)[ \t]*(?P<newline>\n)(?=[ \t]*\S)
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_STREAMING_MARK: Final = " \ue000"
"""Suffix of a line whose paragraph continues, because Qt makes a paragraph of each line, all with the same spacing."""
_RULE_CHARACTERS: Final = frozenset("-=_*:| ")
_PUNCTUATION: Final = re.compile(r"([!-/:-@\[-`{-~])")


class TextBody(QTextBrowser):
    """Text widget without scroll bars; the transcript scrolls."""

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
        self._plain = ""
        """Plain text that is shown; empty while Markdown is."""

    def show_plain(self, text: str) -> None:
        """Show plain text. If it extends the shown text, only the rest is inserted."""
        if self._plain and text.startswith(self._plain):
            cursor = QTextCursor(self.document())
            cursor.movePosition(QTextCursor.MoveOperation.End)
            cursor.insertText(text[len(self._plain) :])
        else:
            self.setPlainText(text)
        self._plain = text

    def show_markdown(self, text: str) -> None:
        """Show GitHub-flavoured Markdown; HTML in it is shown as text."""
        self._plain = ""
        features = QTextDocument.MarkdownFeature
        self.document().setMarkdown(chat_markdown(text), features.MarkdownDialectGitHub | features.MarkdownNoHTML)
        self._finish_blocks()

    def loadResource(self, kind: int, name: QUrl | str) -> Any:
        """Load nothing: text written by a model must not open files or pages."""
        return None

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()

    def _finish_blocks(self) -> None:
        """Let code wrap, as there is no horizontal scroll bar, and remove the spacing between lines of one
        paragraph."""
        block, goes_on = self.document().begin(), False
        while block.isValid():
            cursor, form = QTextCursor(block), block.blockFormat()
            form.setNonBreakableLines(False)
            if goes_on:
                form.setTopMargin(0)
            goes_on = block.text().endswith(_STREAMING_MARK)
            if goes_on:
                form.setBottomMargin(0)
                cursor.movePosition(QTextCursor.MoveOperation.EndOfBlock)
                for _ in _STREAMING_MARK:
                    cursor.deletePreviousChar()
            cursor.setBlockFormat(form)
            block = block.next()

    def _fit(self, size: QSizeF) -> None:
        self.setFixedHeight(max(round(size.height() + 0.5), self.fontMetrics().height()))


def chat_markdown(text: str) -> str:
    r"""Return Markdown that shows `text` as models intend it.

    Line breaks stay line breaks. Formulas (`\(...\)`, `\[...\]`, `$...$`, `$$...$$`) keep their backslashes,
    underscores and asterisks. An image, which is never loaded, becomes a link with its alternative text. Code is
    unchanged.
    """
    return _MARKDOWN_PARTS.sub(_escaped, text)


def split_reasoning(text: str) -> tuple[str, str]:
    """Return (the text between `<think>` tags at the start of an answer, the answer without it)."""
    found = _REASONING.fullmatch(text) or _THINK_END.fullmatch(text)
    return ("", text) if found is None else (found[1].strip(), found[2] or "")


def _escaped(piece: re.Match[str]) -> str:
    if piece["math"]:
        return _PUNCTUATION.sub(r"\\\1", piece["math"]).replace("\n", "  \n")
    if piece["alt"] is not None:
        return f"[Image: {piece['alt'] or 'no description'}]({piece['address']})"
    if piece["newline"]:
        line = piece.string[piece.string.rfind("\n", 0, piece.start()) + 1 : piece.start()]
        return "  \n" if line.endswith("|") or _RULE_CHARACTERS.issuperset(line) else f"{_STREAMING_MARK}  \n"
    return piece[0]


def _open_web_link(url: QUrl) -> None:
    if url.scheme() in ("http", "https"):
        QDesktopServices.openUrl(url)
