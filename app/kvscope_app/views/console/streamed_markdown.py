"""Renders Markdown into a text document while it grows.

Finished segments (`markdown_segments`) are rendered once. Only the last segment is rendered again when text arrives, so
that the time per update does not depend on the length of the text. Code grows by insertion. A long last segment, such
as a long list, is rendered again when it has grown by a share of its length; until then, its new text is inserted as it
is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from PySide6.QtGui import QTextBlock, QTextCursor, QTextDocument, QTextFormat

from kvscope_app.views.console.code_frames import CodeFrames, code_block_format, code_char_format
from kvscope_app.views.console.markdown_segments import (
    MarkdownSegment,
    MarkdownSegmenter,
    has_reference_definitions,
)
from kvscope_app.views.console.markdown_source import CONTINUED_LINE_MARK, chat_markdown
from kvscope_app.views.console.source_alignment import shown_ranges, source_offset

_LONG_SEGMENT_CHARACTERS: Final = 3000
_GROWTH_SHARE: Final = 0.1
_START_MARK: Final = "\ue001"
"""Text of a paragraph before inserted Markdown, because Qt merges the first paragraph into the one at the cursor."""
_FEATURES: Final = QTextDocument.MarkdownFeature.MarkdownDialectGitHub | QTextDocument.MarkdownFeature.MarkdownNoHTML
_MOVE: Final = QTextCursor.MoveOperation
_KEEP: Final = QTextCursor.MoveMode.KeepAnchor


class StreamedMarkdown:
    """Shows a growing Markdown text in `document`, with `frames` around its code."""

    def __init__(self, document: QTextDocument, frames: CodeFrames) -> None:
        self._document = document
        self._frames = frames
        self._clear()

    def _clear(self) -> None:
        self._text = ""
        self._is_complete = False
        self._segmenter = MarkdownSegmenter()
        self._tail_position = 0
        """Position in the document after the last finished segment."""
        self._shown: MarkdownSegment | None = None
        """Unfinished segment as it is shown after `_tail_position`."""
        self._rendered_length = 0
        """Length of the unfinished segment when it was rendered, before text was inserted."""
        self._finished: list[tuple[int, int]] = []
        """For each finished segment, its end in the text and its end position in the document."""

    def show(self, text: str, *, is_complete: bool) -> None:
        """Show `text`. If it extends the text of the last call, only its end is rendered.

        Without `is_complete`, more text is expected, and markup of which only the beginning is known is not shown.
        """
        if text == self._text and is_complete == self._is_complete:
            return
        if self._is_complete or not text.startswith(self._text):
            self.reset()
        self._text, self._is_complete = text, is_complete
        if is_complete and has_reference_definitions(text):
            self.reset()
            self._text, self._is_complete = text, True
            self._finish(MarkdownSegment(0, len(text)))
            return
        for segment in self._segmenter.add(text, is_complete=is_complete):
            self._finish(segment)
        if not is_complete:
            self._render(self._segmenter.open_segment(text))

    def reset(self) -> None:
        self._document.clear()
        self._clear()
        self._frames.find_from(self._document.begin())

    def source_offset(self, position: int) -> int | None:
        """Return the offset in the text of the character at a position in the document, or None if it is not in the
        text.
        """
        index = bisect_left(self._finished, position + 1, key=lambda ends: ends[1])
        start, first = self._finished[index - 1] if index else (0, 0)
        is_last = index == len(self._finished)
        end, last = (len(self._text), self._document.characterCount() - 1) if is_last else self._finished[index]
        shown = self._shown_text(first, last)
        units = shown.encode("utf-16-le")[: 2 * (position - first)]  # positions count UTF-16 units
        offset = source_offset(self._text[start:end], shown, len(units.decode("utf-16-le", "ignore")))
        return None if offset is None else start + offset

    def document_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the (start, end) positions in the document of the shown parts of `ranges`, given as (start, end) in
        the text, in order. Only finished segments are searched.
        """
        found: list[tuple[int, int]] = []
        start = first = 0
        for end, last in self._finished:
            low = bisect_left(ranges, start + 1, key=lambda span: span[1])
            high = bisect_left(ranges, end, key=lambda span: span[0])
            inside = [(max(a, start) - start, min(b, end) - start) for a, b in ranges[low:high]]
            if inside:
                shown = self._shown_text(first, last)
                for a, b in shown_ranges(self._text[start:end], shown, inside):
                    before = len(shown[:a].encode("utf-16-le")) // 2
                    found.append((first + before, first + before + len(shown[a:b].encode("utf-16-le")) // 2))
            start, first = end, last
        return found

    def _shown_text(self, first: int, last: int) -> str:
        cursor = QTextCursor(self._document)
        cursor.setPosition(first)
        cursor.setPosition(last, _KEEP)
        return cursor.selectedText().replace("\u2029", "\n")

    def _finish(self, segment: MarkdownSegment) -> None:
        self._rendered_length = 0
        self._render(segment)
        if segment.is_code:
            self._frames.finish_last()
        self._shown = None
        self._tail_position = self._document.characterCount() - 1
        self._finished.append((segment.end, self._tail_position))

    def _render(self, segment: MarkdownSegment) -> None:
        """Show `segment` in place of the unfinished one."""
        edit = QTextCursor(self._document)
        edit.beginEditBlock()  # one layout for all edits
        if not self._extend(segment):
            self._replace_tail(segment)
        edit.endEditBlock()
        self._frames.color()
        self._shown = segment

    def _replace_tail(self, segment: MarkdownSegment) -> None:
        self._remove_tail()
        self._shown = segment
        self._rendered_length = segment.end - segment.start
        if segment.is_code:
            self._insert_code(segment)
        else:
            self._insert_markdown(self._text[segment.start : segment.end])
        self._frames.find_from(self._first_tail_block())

    def _extend(self, segment: MarkdownSegment) -> bool:
        """Insert the new text of `segment` after the unfinished segment, if this need not be rendered again."""
        shown = self._shown
        if shown is None or (shown.start, shown.is_code) != (segment.start, segment.is_code):
            return False
        if segment.is_code:
            code, shown_code = segment.code(self._text), shown.code(self._text)
            if code.startswith(shown_code):
                self._append_code(code[len(shown_code) :])
            return code.startswith(shown_code)
        length = segment.end - segment.start
        is_due = self._rendered_length < _LONG_SEGMENT_CHARACTERS or length > self._rendered_length * (
            1 + _GROWTH_SHARE
        )
        if is_due or segment.end < shown.end:
            return False
        self._end_cursor().insertText(self._text[shown.end : segment.end])
        return True

    def _remove_tail(self) -> None:
        cursor = QTextCursor(self._document)
        cursor.setPosition(self._tail_position)
        if cursor.atEnd():
            return
        block_format, char_format, colors = (
            cursor.blockFormat(),
            cursor.blockCharFormat(),
            cursor.block().layout().formats(),
        )
        cursor.movePosition(_MOVE.End, _KEEP)
        cursor.removeSelectedText()
        cursor.setBlockFormat(block_format)
        cursor.setBlockCharFormat(char_format)
        cursor.block().layout().setFormats(colors)

    def _insert_markdown(self, text: str) -> None:
        markdown = chat_markdown(text)
        if markdown.strip():
            cursor = self._end_cursor()
            cursor.insertMarkdown(f"{_START_MARK}\n\n{markdown}", _FEATURES)
            cursor.setPosition(self._tail_position)
            cursor.deleteChar()
            if self._tail_position == 0 and not cursor.atEnd() and not _starts_with_table(self._document):
                cursor.deleteChar()  # the empty first paragraph
        self._format_paragraphs(self._first_tail_block())

    def _insert_code(self, segment: MarkdownSegment) -> None:
        block_format, char_format = code_block_format(segment.language, segment.start), code_char_format()
        cursor = self._end_cursor()
        if self._tail_position == 0:
            cursor.setBlockFormat(block_format)
            cursor.setBlockCharFormat(char_format)
        else:
            cursor.insertBlock(block_format, char_format)
        cursor.insertText(segment.code(self._text), char_format)

    def _append_code(self, code: str) -> None:
        if code:
            self._end_cursor().insertText(code, code_char_format())
            self._frames.extend_last()

    def _end_cursor(self) -> QTextCursor:
        cursor = QTextCursor(self._document)
        cursor.movePosition(_MOVE.End)
        return cursor

    def _first_tail_block(self) -> QTextBlock:
        block = self._document.findBlock(self._tail_position)
        return block if self._tail_position == 0 else block.next()

    def _format_paragraphs(self, block: QTextBlock) -> None:
        """Remove the spacing between lines of one paragraph, and set the font of code in lines."""
        is_continued = False
        while block.isValid():
            cursor, block_format = QTextCursor(block), block.blockFormat()
            if is_continued:
                block_format.setTopMargin(0)
            is_continued = block.text().endswith(CONTINUED_LINE_MARK)
            if is_continued:
                block_format.setBottomMargin(0)
                cursor.movePosition(_MOVE.EndOfBlock)
                for _ in CONTINUED_LINE_MARK:
                    cursor.deletePreviousChar()
            block_format.setNonBreakableLines(False)  # there is no horizontal scroll bar
            cursor.setBlockFormat(block_format)
            self._set_code_font(block)
            block = block.next()

    def _set_code_font(self, block: QTextBlock) -> None:
        """Use the product's monospaced font, and the size of the text around it, instead of the system's."""
        fixed: list[tuple[int, int]] = []
        iterator = block.begin()
        while not iterator.atEnd():
            fragment = iterator.fragment()
            if fragment.charFormat().fontFixedPitch():
                fixed.append((fragment.position(), fragment.position() + fragment.length()))
            iterator += 1
        cursor = QTextCursor(block)
        for start, end in fixed:
            cursor.setPosition(start)
            cursor.setPosition(end, _KEEP)
            char_format = cursor.charFormat()
            char_format.setFontFamilies(code_char_format().fontFamilies())
            char_format.clearProperty(QTextFormat.Property.FontPointSize)
            cursor.setCharFormat(char_format)


def _starts_with_table(document: QTextDocument) -> bool:
    return QTextCursor(document.begin().next()).currentTable() is not None
