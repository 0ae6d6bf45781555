"""Frames around the code in a text document: header with language and Copy button, background, and colours.

Code is a run of paragraphs with Qt's format properties for fenced code, so that it can be selected together with the
text around it. The header is a widget in the margin above the first paragraph and not part of the document.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final

from PySide6.QtCore import QRect, QRectF, Qt, QTimer
from PySide6.QtGui import (
    QColor,
    QFont,
    QFontMetrics,
    QGuiApplication,
    QPainter,
    QPainterPath,
    QTextBlock,
    QTextBlockFormat,
    QTextCharFormat,
    QTextCursor,
    QTextDocument,
    QTextFormat,
    QTextLayout,
)
from PySide6.QtWidgets import QHBoxLayout, QWidget

from kvscope_app.ui.fonts import MONO_FAMILIES
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.widget_factories import label, set_icon, tool_button
from kvscope_app.views.console.code_colors import code_background, code_palette, color_runs, lexer_for

_PADDING: Final = 8
_GAP: Final = 8
"""Distance between a frame and the text above and below it, in pixels."""
_RADIUS: Final = 6
_COPIED_MS: Final = 1500
_WINDOW_CHARACTERS: Final = 1500
"""While code grows, about this many of its last characters are coloured again."""
_TWO_UNITS: Final = re.compile("[\U00010000-\U0010ffff]")
_NO_LANGUAGE: Final = "Code"
_KEY_PROPERTY: Final = QTextFormat.Property.UserProperty.value + 1


@dataclass(slots=True)
class _CodeFrame:
    start: int
    """Position of the first character in the document."""
    end: int
    """Position after the last character."""
    language: str
    colored_from: int = 0
    """Position from which growing code is coloured again: the start of a line."""
    has_grown: bool = False
    rect: QRectF = field(default_factory=QRectF)
    """Area in the document, with the header, when the headers were placed last."""


class CodeFrames:
    """Frames of all code in `document`. The headers are children of `viewport`, which shows the document."""

    def __init__(self, document: QTextDocument, viewport: QWidget) -> None:
        self._document = document
        self._viewport = viewport
        self._frames: list[_CodeFrame] = []
        self._headers: list[CodeHeader] = []
        self._num_placed = 0
        """Number of frames, from the first one, whose area is known."""
        self._num_colored = 0
        self._theme: Theme = DARK

    def find_from(self, block: QTextBlock) -> None:
        """Find the code from `block` to the end of the document again, and format it.

        `color` colours it.
        """
        if block.isValid():
            del self._frames[bisect_left(self._frames, block.position(), key=lambda frame: frame.start) :]
            self._num_placed = min(self._num_placed, len(self._frames))
            self._num_colored = min(self._num_colored, len(self._frames))
        while block.isValid():
            language = _code_language(block)
            if language is None:
                block = block.next()
                continue
            start = block.position()
            last = block
            while _is_same_code(block, last.next()):
                last = last.next()
            frame = _CodeFrame(start, _end_of(last), language, start)
            self._frames.append(frame)
            self._set_fonts(block, last)
            self._set_margins(frame)
            block = last.next()
        self._fit_document()

    def extend_last(self) -> None:
        """Format code that was inserted at the end of the document, into the last frame."""
        frame = self._frames[-1]
        old_last = self._document.findBlock(frame.end)
        frame.end, frame.has_grown = _end_of(self._document.lastBlock()), True
        self._num_placed = min(self._num_placed, len(self._frames) - 1)
        self._num_colored = min(self._num_colored, len(self._frames) - 1)
        self._set_margins(frame, old_last)

    def color(self) -> None:
        """Colour the code that is new since the last call. Must be called outside of edit blocks: Qt would not report
        their changes.
        """
        for frame in self._frames[self._num_colored :]:
            self._color_end(frame)
        self._num_colored = len(self._frames)

    def finish_last(self) -> None:
        """Color the last frame's code as a whole if it was coloured in parts while it grew."""
        frame = self._frames[-1]
        if frame.colored_from > frame.start and frame.has_grown:
            frame.colored_from = frame.start
            self._color(frame)

    def format_all(self) -> None:
        """Set the margins again after the font has changed."""
        for frame in self._frames:
            self._set_margins(frame)
        self._fit_document()

    def apply_theme(self, theme: Theme) -> None:
        if theme is self._theme:
            return
        self._theme = theme
        for frame in self._frames:
            frame.colored_from = frame.start
            self._color_end(frame)
        for header in self._headers:
            header.apply_theme(theme)

    def place_headers(self, *, is_new_layout: bool = False) -> None:
        """Place the headers of new and changed frames, or of all frames after the width or the font has changed."""
        first = 0 if is_new_layout else self._num_placed
        for index in range(first, len(self._frames)):
            frame = self._frames[index]
            if index == len(self._headers):
                self._headers.append(CodeHeader(self._viewport))
                self._headers[index].apply_theme(self._theme)
            header, rect = self._headers[index], self._rect_of(frame)
            frame.rect = rect
            header.show_code(frame.language, partial(self._code_of, frame))
            header.setGeometry(QRect(round(rect.left()), round(rect.top()), round(rect.width()), self._header_height))
            header.show()
        for header in self._headers[len(self._frames) :]:
            header.hide()
        self._num_placed = len(self._frames)

    def paint(self, painter: QPainter, clip: QRect) -> None:
        """Paint backgrounds and borders of the frames in `clip`."""
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        first = bisect_left(self._frames, float(clip.top()), key=lambda frame: frame.rect.bottom())
        for frame in islice(self._frames, first, None):
            if frame.rect.top() > clip.bottom():
                break
            path = QPainterPath()
            path.addRoundedRect(frame.rect.adjusted(0.5, 0.5, -0.5, -0.5), _RADIUS, _RADIUS)
            painter.fillPath(path, QColor(code_background(self._theme)))
            painter.setPen(QColor(self._theme.border))
            painter.drawPath(path)
            line_y = round(frame.rect.top()) + self._header_height
            painter.drawLine(round(frame.rect.left()) + 1, line_y, round(frame.rect.right()) - 1, line_y)

    def _code_of(self, frame: _CodeFrame) -> str:
        lines = []
        block = self._document.findBlock(frame.start)
        while block.isValid() and block.position() <= frame.end:
            lines.append(block.text().replace("\u2028", "\n"))
            block = block.next()
        return "\n".join(lines)

    @property
    def _header_height(self) -> int:
        return QFontMetrics(self._document.defaultFont()).height() + 10

    def _rect_of(self, frame: _CodeFrame) -> QRectF:
        layout = self._document.documentLayout()
        first, last = self._document.findBlock(frame.start), self._document.findBlock(frame.end)
        top = layout.blockBoundingRect(first).top() - self._header_height - _PADDING
        bottom = layout.blockBoundingRect(last).bottom() + _PADDING
        block_format = first.blockFormat()
        left = block_format.leftMargin() + block_format.indent() * self._document.indentWidth() - _PADDING
        return QRectF(left, top, max(self._document.textWidth(), 0) - left, bottom - top)

    def _set_margins(self, frame: _CodeFrame, block: QTextBlock | None = None) -> None:
        """Set the margins of the frame's paragraphs, from `block` on."""
        block = block or self._document.findBlock(frame.start)
        while block.isValid() and block.position() <= frame.end:
            block_format = block.blockFormat()
            top = bottom = 0
            if block.position() == frame.start:
                above = _PADDING if _code_language(block.previous()) is not None else 0  # adjacent margins overlap
                top = above + _GAP + self._header_height + _PADDING
            if _end_of(block) == frame.end:
                bottom = _PADDING + _GAP
            base = _quote_margin(block_format)
            block_format.setTopMargin(top)
            block_format.setBottomMargin(bottom)
            block_format.setLeftMargin(base + _PADDING)
            block_format.setRightMargin(_PADDING)
            block_format.setNonBreakableLines(False)  # there is no horizontal scroll bar
            if block_format != block.blockFormat():
                QTextCursor(block).setBlockFormat(block_format)
            block = block.next()

    def _set_fonts(self, first: QTextBlock, last: QTextBlock) -> None:
        cursor = QTextCursor(first)
        cursor.setPosition(_end_of(last), QTextCursor.MoveMode.KeepAnchor)
        cursor.setCharFormat(code_char_format())

    def _fit_document(self) -> None:
        """Reserve space for a header at the top of the document, and below a frame at its end, where paragraphs have no
        margins.
        """
        root = self._document.rootFrame()
        root_format = root.frameFormat()
        is_first = bool(self._frames) and self._frames[0].start == 0
        top = self._header_height + _PADDING if is_first else 0
        bottom = _PADDING if self._frames else 0
        if (root_format.topMargin(), root_format.bottomMargin()) != (top, bottom):
            root_format.setTopMargin(top)
            root_format.setBottomMargin(bottom)
            root.setFrameFormat(root_format)

    def _color_end(self, frame: _CodeFrame) -> None:
        """Colour the code from `frame.colored_from` on, and move this position towards the end."""
        self._color(frame)
        if frame.end - frame.colored_from > 2 * _WINDOW_CHARACTERS:
            block = self._document.findBlock(frame.end - _WINDOW_CHARACTERS)
            while block.position() > frame.colored_from and not _starts_token(block):
                block = block.previous()
            frame.colored_from = max(frame.colored_from, block.position())

    def _color(self, frame: _CodeFrame) -> None:
        """Colour the code from `frame.colored_from` on."""
        lexer = lexer_for(frame.language)
        if lexer is None:
            return
        formats = {role: _color_format(color) for role, color in code_palette(self._theme).items()}
        block = self._document.findBlock(frame.colored_from)
        cursor = QTextCursor(block)
        cursor.setPosition(frame.end, QTextCursor.MoveMode.KeepAnchor)
        code = cursor.selectedText().replace("\u2029", "\n").replace("\u2028", "\n")
        code = _TWO_UNITS.sub("xx", code)  # Qt counts such a character as two
        ranges: dict[int, list[QTextLayout.FormatRange]] = {}
        offset = block.position()
        for start, end, role in color_runs(lexer, code):
            while start < end:
                while offset + start >= block.position() + block.length():
                    block = block.next()
                in_block = offset + start - block.position()
                length = min(end - start, block.length() - in_block)
                format_range = QTextLayout.FormatRange()
                format_range.start, format_range.length, format_range.format = in_block, length, formats[role]
                ranges.setdefault(block.blockNumber(), []).append(format_range)
                start += length
        block = self._document.findBlock(frame.colored_from)
        while block.isValid() and block.position() <= frame.end:
            block.layout().setFormats(ranges.get(block.blockNumber(), []))
            block = block.next()
        self._document.markContentsDirty(frame.colored_from, frame.end - frame.colored_from)


class CodeHeader(QWidget):
    """Language of a code block, and the button that copies the code."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setCursor(Qt.CursorShape.ArrowCursor)
        self.language = label(look="muted", elastic=True)
        self.copy = tool_button("Copy", "Copy this code")
        self.copy.setAccessibleName("Copy code")
        self._timer = QTimer(self, singleShot=True, interval=_COPIED_MS)
        self._timer.timeout.connect(lambda: self._set_copied(False))
        self._theme: Theme = DARK
        self._code: Callable[[], str] = str
        self.copy.clicked.connect(self._on_copy)
        row = QHBoxLayout(self)
        row.setContentsMargins(_PADDING, 1, 2, 1)
        row.addWidget(self.language, 1)
        row.addWidget(self.copy)

    def show_code(self, language: str, code: Callable[[], str]) -> None:
        """Set the code's language, and the function that returns the code."""
        self._code = code
        self.language.setText(language or _NO_LANGUAGE)

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._set_copied(self._timer.isActive())

    def _on_copy(self) -> None:
        QGuiApplication.clipboard().setText(self._code())
        self._timer.start()
        self._set_copied(True)

    def _set_copied(self, is_copied: bool) -> None:
        set_icon(self.copy, "copy", self._theme)
        self.copy.setText("Copied" if is_copied else "Copy")
        self.copy.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)


def code_block_format(language: str, key: int) -> QTextBlockFormat:
    """Return the paragraph format that Qt's Markdown importer gives to fenced code. Adjacent paragraphs with different
    values of `key` have separate frames.
    """
    block_format = QTextBlockFormat()
    block_format.setProperty(QTextFormat.Property.BlockCodeFence, "`")
    block_format.setProperty(QTextFormat.Property.BlockCodeLanguage, language)
    block_format.setProperty(_KEY_PROPERTY, key)
    return block_format


def code_char_format() -> QTextCharFormat:
    """Return the character format of code: monospaced, in the size of the text around it."""
    char_format = QTextCharFormat()
    char_format.setFontFamilies(list(MONO_FAMILIES))
    char_format.setFontFixedPitch(True)
    char_format.setFontStyleHint(QFont.StyleHint.Monospace)
    return char_format


def _code_language(block: QTextBlock) -> str | None:
    """Return the language of a paragraph of code, "" if it is unknown, or None if the paragraph is not code."""
    block_format = block.blockFormat()
    if not (
        block_format.hasProperty(QTextFormat.Property.BlockCodeFence)
        or block_format.hasProperty(QTextFormat.Property.BlockCodeLanguage)
    ):
        return None
    words = str(block_format.property(QTextFormat.Property.BlockCodeLanguage) or "").split()
    return words[0].lower() if words else ""


def _is_same_code(block: QTextBlock, other: QTextBlock) -> bool:
    return other.isValid() and _code_key(other) == _code_key(block)


def _code_key(block: QTextBlock) -> tuple[object, ...]:
    block_format = block.blockFormat()
    properties = (_KEY_PROPERTY, QTextFormat.Property.BlockQuoteLevel)
    return (_code_language(block), block_format.indent(), *map(block_format.property, properties))


def _end_of(block: QTextBlock) -> int:
    return block.position() + block.length() - 1


def _quote_margin(block_format: QTextBlockFormat) -> float:
    """Return the left margin of a quotation of this paragraph's level, as in Qt's Markdown importer."""
    return 40.0 * float(block_format.property(QTextFormat.Property.BlockQuoteLevel) or 0)


def _starts_token(block: QTextBlock) -> bool:
    """Whether a coloured line does not begin inside a comment or string that began on an earlier line."""
    previous = block.previous()
    ranges = previous.layout().formats()
    return not ranges or ranges[-1].start + ranges[-1].length < previous.length()


def _color_format(color: str) -> QTextCharFormat:
    char_format = QTextCharFormat()
    char_format.setForeground(QColor(color))
    return char_format
