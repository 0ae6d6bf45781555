"""Make text from engines, servers and files safe to display: whatever they send, it controls no terminal and no parser.

Every command prints such text with `print_line` or `print_text`.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from typing import Final, TextIO

_JOINERS: Final = "\u200c\u200d"
"""Format characters that words and emoji need; the other ones reorder or hide text."""
_NOT_IN_XML: Final = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
"""Complement of `Char` in XML 1.0, 2.2: no document may contain these, not even escaped."""


def printable(text: str, *, keep: str = "", replacement: str = "?") -> str:
    """Replace control characters, bidirectional overrides, line separators, surrogates and unassigned characters.

    `keep` lists control characters that are left as they are, such as a newline.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter in keep or _is_shown(letter) else replacement for letter in text)


def xml_text(text: str) -> str:
    """Replace what no XML document may contain by U+FFFD. Escapes nothing."""
    return _NOT_IN_XML.sub("\ufffd", text)


def print_line(text: str, *, file: TextIO | None = None, prefix: str = "") -> None:
    """Print one line and flush. `prefix` is printed unchanged: it may hold our own terminal sequences."""
    print(prefix + printable(text), file=file or sys.stdout, flush=True)


def print_text(text: str, *, file: TextIO | None = None) -> None:
    """Print several lines and flush."""
    print(printable(text, keep="\n\t"), file=file or sys.stdout, flush=True)


def _is_shown(letter: str) -> bool:
    return letter.isprintable() or letter in _JOINERS or unicodedata.category(letter) == "Zs"
