"""Splits growing Markdown into segments that can be rendered one by one. Imports no Qt.

A segment is a fenced code block, or a run of other blocks that belong together, such as a paragraph or a whole list.
Text that is appended later changes only the last segment, so that finished segments are rendered once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

_FENCE: Final = re.compile(r" {0,3}(?P<fence>`{3,}(?=[^`\n]*$)|~{3,})[ \t]*(?P<info>[^\n]*)")
_LIST_ITEM: Final = re.compile(r" {0,3}(?:[-+*]|\d{1,9}[.)])(?:\s|$)")
_FIRST_ITEM: Final = re.compile(r" {0,1}1[.)]")
_MARKER_ONLY: Final = re.compile(r"[ \t]*+(?:[-+*=#>|`~]++|\d{1,9}[.)])?+[ \t]*+")
"""Pattern of an unfinished line that has only markup so far. Rendered alone, `-` would make the line above a title."""
_REFERENCE: Final = re.compile(r"^ {0,3}\[[^\]\n]{1,500}\]:[ \t]*\S", re.MULTILINE)
_LIST_INDENT: Final = 2
_MAX_LIST_CHARACTERS: Final = 2000
"""Longer lists are split before an item. Numbers continue, because each list starts with the number in the
text; lists whose items are all numbered 1 are not split.
"""
_MAX_FORMULA_CHARACTERS: Final = 2000


@dataclass(frozen=True, slots=True)
class MarkdownSegment:
    """Part of a Markdown text: `start` and `end` are offsets of characters."""

    start: int
    end: int
    is_code: bool = False
    """Whether the segment is one fenced code block."""
    code_start: int = 0
    """For fenced code, the offsets of the code between the fences; `code_end` is before the last newline."""
    code_end: int = 0
    code_indent: int = 0
    """For fenced code, the number of spaces before the opening fence, which are not part of the code's lines."""
    language: str = ""
    """For fenced code, the first word after the opening fence, in lower case."""

    def code(self, text: str) -> str:
        code = text[self.code_start : self.code_end]
        return re.sub(rf"^ {{1,{self.code_indent}}}", "", code, flags=re.MULTILINE) if self.code_indent else code


class MarkdownSegmenter:
    """Finds the segments of a text that grows at its end. Each line is inspected once."""

    def __init__(self) -> None:
        self._position = 0
        """Offset of the first line that was not inspected."""
        self._open = MarkdownSegment(0, 0)
        self._fence = ""
        """Opening fence of the open segment if it is code, else ""."""
        self._is_list = False
        self._is_after_blank = False

    def add(self, text: str, *, is_complete: bool = False) -> list[MarkdownSegment]:
        """Return the segments that have ended since the last call. `text` is the whole text so far.

        With `is_complete`, no more text follows, and the last segment is returned as well.
        """
        closed: list[MarkdownSegment] = []
        while (end := text.find("\n", self._position)) >= 0:
            self._inspect(text, self._position, end + 1, closed)
            self._position = end + 1
        if is_complete:
            if self._position < len(text):
                self._inspect(text, self._position, len(text), closed)
                self._position = len(text)
            if self._open.start < len(text):
                closed.append(replace(self.open_segment(text, is_complete=True), end=len(text)))
                self._begin(len(text))
        return closed

    def open_segment(self, text: str, *, is_complete: bool = False) -> MarkdownSegment:
        """Return the last segment, which may grow. Unless `is_complete`, its end excludes an unfinished line that so
        far consists only of markup.
        """
        end = len(text)
        line_start = text.rfind("\n", self._open.start) + 1 or self._open.start
        if not is_complete and line_start < end and _MARKER_ONLY.fullmatch(text, line_start):
            end = line_start
        if not self._open.is_code:
            return replace(self._open, end=end)
        code_end = max(self._open.code_start, end - text.endswith("\n", self._open.code_start, end))
        return replace(self._open, end=end, code_end=code_end)

    def _inspect(self, text: str, start: int, end: int, closed: list[MarkdownSegment]) -> None:
        line = text[start:end].rstrip("\n").expandtabs(4)
        if self._fence:
            if _is_closing(line, self._fence):
                closed.append(replace(self._open, end=end, code_end=max(self._open.code_start, start - 1)))
                self._begin(end)
            return
        if not line.strip():
            self._is_after_blank = True
            return
        indent = len(line) - len(line.lstrip(" "))
        is_nested = self._is_list and indent >= _LIST_INDENT
        fence = None if is_nested else _FENCE.fullmatch(line)
        is_item = _LIST_ITEM.match(line) is not None
        is_long_list = self._is_list and start - self._open.start > _MAX_LIST_CHARACTERS
        is_split = is_long_list and is_item and not is_nested and not _FIRST_ITEM.match(line)
        ends = is_split or (self._is_after_blank and self._ends_before(text, start, indent, is_item))
        if fence is not None or ends:
            if start > self._open.start:
                closed.append(replace(self._open, end=start))
            self._begin(start)
        if fence is not None:
            self._fence = fence["fence"]
            language = (fence["info"].split() or [""])[0].strip("{}.").lower()
            self._open = MarkdownSegment(start, end, True, end, end, indent, language)
        self._is_list = self._is_list or is_item
        self._is_after_blank = False

    def _ends_before(self, text: str, start: int, indent: int, is_item: bool) -> bool:
        """Whether the open segment ends before a line that follows a blank line and starts at offset `start`."""
        if indent > 3 or (self._is_list and (is_item or indent >= _LIST_INDENT)):
            return False
        if start - self._open.start > _MAX_FORMULA_CHARACTERS:
            return True
        part = text[self._open.start : start]
        return part.count("$$") % 2 == 0 and part.count("\\[") <= part.count("\\]")

    def _begin(self, start: int) -> None:
        self._open = MarkdownSegment(start, start)
        self._fence = ""
        self._is_list = self._is_after_blank = False


def has_reference_definitions(text: str) -> bool:
    """Whether `text` defines link targets (`[1]: http://…`), which links in any of its segments may use."""
    return _REFERENCE.search(text) is not None


def _is_closing(line: str, fence: str) -> bool:
    stripped = line.strip(" ")
    return len(line) - len(line.lstrip(" ")) <= 3 and len(stripped) >= len(fence) and set(stripped) == {fence[0]}
