"""Text of one message at full height: plain while it grows, Markdown once it is complete."""

from __future__ import annotations

import re
from typing import Any, Final

from PySide6.QtCore import QSizeF, Qt, QUrl
from PySide6.QtGui import QDesktopServices, QTextCursor, QTextDocument, QTextOption, QWheelEvent
from PySide6.QtWidgets import QFrame, QSizePolicy, QTextBrowser

_REASONING: Final = re.compile(r"\s*<think>\s*(.*?)\s*(?:</think>\s*(.*))?", re.DOTALL)
_THINK_END: Final = re.compile(r"(.*?)\n</think>\s*(.*)", re.DOTALL)
"""Pattern for reasoning that ends in `</think>` without a `<think>` before it, which was part of the chat template."""
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
_CONTINUED_LINE_MARK: Final = " \ue000"
"""Suffix of a line that is followed by a line of the same paragraph. Qt makes each line a paragraph; the mark tells
`_finish_blocks` where to remove the spacing between them.
"""
_RULE_CHARACTERS: Final = frozenset("-=_*:| ")
_PUNCTUATION: Final = re.compile(r"([!-/:-@\[-`{-~])")


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
        self._plain = ""
        """Plain text that is shown; empty while Markdown is shown."""

    def show_plain(self, text: str) -> None:
        """Show plain text. If it extends the shown text, only the new part is inserted."""
        if self._plain and text.startswith(self._plain):
            cursor = QTextCursor(self.document())
            cursor.movePosition(QTextCursor.MoveOperation.End)
            cursor.insertText(text[len(self._plain) :])
        else:
            self.setPlainText(text)
        self._plain = text

    def show_markdown(self, text: str) -> None:
        self._plain = ""
        features = QTextDocument.MarkdownFeature
        self.document().setMarkdown(chat_markdown(text), features.MarkdownDialectGitHub | features.MarkdownNoHTML)
        self._finish_blocks()

    def loadResource(self, kind: int, name: QUrl | str) -> Any:
        """Load nothing: text from a model must not open files or pages."""
        return None

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()

    def _finish_blocks(self) -> None:
        """Wrap code, because there is no horizontal scroll bar, and remove spacing between lines of one paragraph."""
        block, is_continued = self.document().begin(), False
        while block.isValid():
            cursor, block_format = QTextCursor(block), block.blockFormat()
            block_format.setNonBreakableLines(False)
            if is_continued:
                block_format.setTopMargin(0)
            is_continued = block.text().endswith(_CONTINUED_LINE_MARK)
            if is_continued:
                block_format.setBottomMargin(0)
                cursor.movePosition(QTextCursor.MoveOperation.EndOfBlock)
                for _ in _CONTINUED_LINE_MARK:
                    cursor.deletePreviousChar()
            cursor.setBlockFormat(block_format)
            block = block.next()

    def _adjust_height(self, size: QSizeF) -> None:
        self.setFixedHeight(max(round(size.height() + 0.5), self.fontMetrics().height()))


def chat_markdown(text: str) -> str:
    r"""Return Markdown that renders `text` as models intend it.

    Line breaks stay line breaks. Formulas (`\(...\)`, `\[...\]`, `$...$`, `$$...$$`) keep their backslashes,
    underscores and asterisks. An image, which is never loaded, becomes a link with its alternative text. Code is
    unchanged.
    """
    return _MARKDOWN_PARTS.sub(_markdown_of, text)


def split_reasoning(text: str) -> tuple[str, str]:
    """Return (reasoning between `<think>` tags at the start of `text`, remaining answer). Both may be empty."""
    match = _REASONING.fullmatch(text) or _THINK_END.fullmatch(text)
    return ("", text) if match is None else (match[1].strip(), match[2] or "")


def _markdown_of(match: re.Match[str]) -> str:
    if match["math"]:
        return _PUNCTUATION.sub(r"\\\1", match["math"]).replace("\n", "  \n")
    if match["alt"] is not None:
        return f"[Image: {match['alt'] or 'no description'}]({match['address']})"
    if match["newline"]:
        line = match.string[match.string.rfind("\n", 0, match.start()) + 1 : match.start()]
        return "  \n" if line.endswith("|") or _RULE_CHARACTERS.issuperset(line) else f"{_CONTINUED_LINE_MARK}  \n"
    return match[0]


def _open_web_link(url: QUrl) -> None:
    if url.scheme() in ("http", "https"):
        QDesktopServices.openUrl(url)
