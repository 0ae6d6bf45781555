"""Makes text from clients, engines, servers and files safe to encode, and safe to display on a terminal, which the text
could otherwise control.

All commands print such text with `print_line` or `print_text`.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from typing import Final, TextIO

from kvscope_telemetry.errors import BadInput

_JOINERS: Final = "\u200c\u200d"
"""Format characters that are needed in words and emoji. Others could reorder or hide text."""
_NOT_IN_XML: Final = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
"""Characters that XML documents must not contain, not even escaped: the complement of `Char` in XML 1.0, section 2.2.
"""


def printable(text: str, *, keep: str = "", replacement: str = "?") -> str:
    """Replace control characters, bidirectional overrides, line separators, surrogates and unassigned characters.

    `keep` lists control characters to leave unchanged, such as a newline.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter in keep or _is_shown(letter) else replacement for letter in text)


def xml_text(text: str) -> str:
    """Replace characters that XML does not allow by U+FFFD. Nothing is escaped."""
    return _NOT_IN_XML.sub("\ufffd", text)


def valid_text(text: str, *, name: str = "text") -> str:
    """Return `text`. Raises BadInput if it has a lone surrogate, which UTF-8 cannot encode. `name` is for the error."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{text[error.start]!r} at position {error.start} is half of a surrogate pair"
        raise BadInput(f"{name} is not accepted: {half}, not a character") from None
    return text


def print_line(text: str, *, file: TextIO | None = None, prefix: str = "") -> None:
    """Print one line and flush. `prefix` is printed unchanged, because it may contain terminal sequences of kvscope."""
    print(prefix + printable(text), file=file or sys.stdout, flush=True)


def print_text(text: str, *, file: TextIO | None = None) -> None:
    print(printable(text, keep="\n\t"), file=file or sys.stdout, flush=True)


def _is_shown(letter: str) -> bool:
    return letter.isprintable() or letter in _JOINERS or unicodedata.category(letter) == "Zs"
