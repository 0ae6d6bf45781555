"""Text of an answer that is still arriving, and searches in it that wait for more text.

The searches are generators: each yields when it needs more text and resumes at the same position, so that no character
is searched twice, however the answer is divided into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator
from typing import Final, TypeAlias, TypeVar

_Found = TypeVar("_Found")
Search: TypeAlias = Generator[None, None, _Found]

MAX_HEAD_CHARACTERS: Final = 300
"""Maximum length of a match of `StreamedText.match`. Function names with the marks around them are shorter."""
JSON_TOKENS: Final = re.compile(r'\\.|[\[\]{}]|"', re.DOTALL)
PYTHON_TOKENS: Final = re.compile(r"""\\.|[\[\](){}]|\"{3}|'{3}|"|'""", re.DOTALL)


class EndOfTextError(Exception):
    """Raised when the answer ends before the searched text was found."""


class StreamedText:
    """The part of an answer that has not been returned yet. `is_complete` is set once no more text will arrive."""

    def __init__(self) -> None:
        self.text = ""
        self.is_complete = False

    def pop(self, length: int) -> str:
        popped, self.text = self.text[:length], self.text[length:]
        return popped

    def find(self, mark: str, start: int) -> Search[int]:
        while (index := self.text.find(mark, start)) < 0:
            start = max(start, len(self.text) - len(mark) + 1)
            yield from self._await_more()
        return index

    def skip(self, characters: str, start: int) -> Search[int]:
        """Return the index of the first character from `start` on that is not in `characters`; the text's length if
        there is none.
        """
        while True:
            while start < len(self.text) and self.text[start] in characters:
                start += 1
            if start < len(self.text) or self.is_complete:
                return start
            yield

    def expect(self, marks: tuple[str, ...], start: int) -> Search[tuple[str, int]]:
        """Return which of `marks` follows, ignoring white space, and the index of its end; `("", start)` if none
        follows.

        Raises EndOfTextError if the text ends within a mark.
        """
        index = yield from self.skip(" \t\r\n", start)
        while True:
            for mark in marks:
                if self.text.startswith(mark, index):
                    return mark, index + len(mark)
            if not any(mark.startswith(self.text[index:]) for mark in marks):
                return "", start
            yield from self._await_more()

    def match(self, pattern: re.Pattern[str], start: int) -> Search[re.Match[str] | None]:
        """Return the match of `pattern` at `start`; None if there is none within `MAX_HEAD_CHARACTERS`, or the text
        ends before.
        """
        while not (match := pattern.match(self.text, start, start + MAX_HEAD_CHARACTERS)):
            if self.is_complete or len(self.text) >= start + MAX_HEAD_CHARACTERS:
                return None
            yield
        return match

    def closing(self, tokens: re.Pattern[str], start: int, longest_token: int = 1) -> Search[int]:
        """Return the index after the bracket that closes the one at `start`. Brackets within strings do not count.

        `tokens` matches the brackets, quotes and escapes of a language; other matches than brackets and escapes are
        quotes. A match has at most `longest_token` characters, so that a quote divided between two pieces is found.
        Raises EndOfTextError.
        """
        depth, quote = 0, ""
        while True:
            match = tokens.search(self.text, start)
            if match is None or self._may_grow(match, tokens):
                unread = max(longest_token - 1, self.text.endswith("\\"))
                start = match.start() if match else max(start, len(self.text) - unread)
                yield from self._await_more()
                continue
            token, start = match[0], match.end()
            if quote:
                quote = "" if token == quote else quote
            elif token in "[{(":
                depth += 1
            elif token in "]})":
                depth -= 1
                if depth <= 0:
                    return start
            elif token[0] != "\\":
                quote = token

    def _may_grow(self, quote: re.Match[str], tokens: re.Pattern[str]) -> bool:
        """Whether a quote at the end of the text may become Python's triple quote."""
        tail = self.text[quote.start() :]
        is_short = tokens is PYTHON_TOKENS and not self.is_complete and len(tail) < 3
        return is_short and tail in ('"', "'", '""', "''")

    def _await_more(self) -> Search[None]:
        if self.is_complete:
            raise EndOfTextError
        yield


def partial_mark_length(text: str, marks: Collection[str]) -> int:
    """Return the length of the longest ending of `text` with which one of `marks` begins."""
    start = max(0, len(text) - max(map(len, marks)) + 1)
    firsts = {mark[0] for mark in marks}
    for index in range(start, len(text)):
        if text[index] in firsts and any(mark.startswith(text[index:]) for mark in marks):
            return len(text) - index
    return 0
