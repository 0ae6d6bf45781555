"""Text of an answer that is still arriving, and searches in it that wait for more.

The searches are generators: each yields when it needs more text and is resumed where it stopped, so that no character
is searched twice, however the answer is cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Final, TypeAlias, TypeVar

_Found = TypeVar("_Found")
Search: TypeAlias = Generator[None, None, _Found]

MAX_HEAD: Final = 300
"""Characters that a pattern may match: names and the marks around them are shorter."""
JSON_TOKENS: Final = re.compile(r'\\.|[\[\]{}]|"', re.DOTALL)
PYTHON_TOKENS: Final = re.compile(r"""\\.|[\[\](){}]|\"{3}|'{3}|"|'""", re.DOTALL)


class EndOfTextError(Exception):
    """Raised when the answer ends before the searched text was found."""


class StreamedText:
    """The part of an answer that has not been returned yet. `is_complete` is set when no more text will come."""

    def __init__(self) -> None:
        self.text = ""
        self.is_complete = False

    def pop(self, length: int) -> str:
        """Remove and return the first `length` characters."""
        popped, self.text = self.text[:length], self.text[length:]
        return popped

    def find(self, mark: str, start: int) -> Search[int]:
        """Return the index of the next `mark`. Raises EndOfTextError."""
        while (index := self.text.find(mark, start)) < 0:
            start = max(start, len(self.text) - len(mark) + 1)
            yield from self._more()
        return index

    def skip(self, characters: str, start: int) -> Search[int]:
        """Return the index of the next character that is none of `characters`; the text's length at its end."""
        while True:
            while start < len(self.text) and self.text[start] in characters:
                start += 1
            if start < len(self.text) or self.is_complete:
                return start
            yield

    def expect(self, marks: tuple[str, ...], start: int) -> Search[tuple[str, int]]:
        """Return which of `marks` comes next, white space aside, and the index of its end; else "" and `start`.

        Raises EndOfTextError where the text ends within a mark.
        """
        place = yield from self.skip(" \t\r\n", start)
        while True:
            for mark in marks:
                if self.text.startswith(mark, place):
                    return mark, place + len(mark)
            if not any(mark.startswith(self.text[place:]) for mark in marks):
                return "", start
            yield from self._more()

    def match(self, pattern: re.Pattern[str], start: int) -> Search[re.Match[str] | None]:
        """Return the match of `pattern` at `start`; None if it is longer than `MAX_HEAD`, or the text ends before."""
        while not (found := pattern.match(self.text, start, start + MAX_HEAD)):
            if self.is_complete or len(self.text) >= start + MAX_HEAD:
                return None
            yield
        return found

    def closing(self, tokens: re.Pattern[str], start: int) -> Search[int]:
        """Return the index after the bracket that closes the one at `start`. Brackets within strings do not count.

        `tokens` matches the brackets and quotes of a language, and its escapes. Raises EndOfTextError.
        """
        depth, quote = 0, ""
        while True:
            found = tokens.search(self.text, start)
            if found is None or self._may_grow(found, tokens):
                has_open_escape = found is None and self.text.endswith("\\")
                start = found.start() if found else max(start, len(self.text) - has_open_escape)
                yield from self._more()
                continue
            token, start = found[0], found.end()
            if quote:
                quote = "" if token == quote else quote
            elif token[0] in "\"'":
                quote = token
            elif token in "[{(":
                depth += 1
            elif token in "]})":
                depth -= 1
                if depth <= 0:
                    return start

    def _may_grow(self, found: re.Match[str], tokens: re.Pattern[str]) -> bool:
        """Whether a quote at the end of the text may become Python's triple quote."""
        ahead = self.text[found.start() :]
        is_short = tokens is PYTHON_TOKENS and not self.is_complete and len(ahead) < 3
        return is_short and ahead in ('"', "'", '""', "''")

    def _more(self) -> Search[None]:
        if self.is_complete:
            raise EndOfTextError
        yield
