"""Colours of code by Pygments, which is imported when code is first shown."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from kvscope_app.ui.theme import Theme, contrast_ratio, mix

if TYPE_CHECKING:
    from pygments.lexer import Lexer

MIN_CONTRAST: Final = 4.5
"""Minimum contrast ratio of text to its background (WCAG 2.1, criterion 1.4.3)."""
MAX_COLORED_CHARACTERS: Final = 60_000
MAX_COLORED_LINE: Final = 2000
"""Longer lines are not coloured: they are data rather than code, and some lexers need quadratic time for them."""

_ROLES: Final = {
    "Token.Comment": "comment",
    "Token.Comment.Preproc": "keyword",
    "Token.Keyword": "keyword",
    "Token.Keyword.Constant": "number",
    "Token.Keyword.Type": "type",
    "Token.Literal.Number": "number",
    "Token.Literal.String": "string",
    "Token.Name.Attribute": "type",
    "Token.Name.Builtin": "type",
    "Token.Name.Class": "function",
    "Token.Name.Decorator": "function",
    "Token.Name.Exception": "type",
    "Token.Name.Function": "function",
    "Token.Name.Tag": "keyword",
    "Token.Name.Variable": "type",
    "Token.Operator.Word": "keyword",
    "Token.Generic.Deleted": "deleted",
    "Token.Generic.Inserted": "string",
    "Token.Generic.Heading": "function",
    "Token.Generic.Subheading": "function",
    "Token.Generic.Prompt": "comment",
}
"""Role of Pygments' token types. A type that is missing has the role of the type that contains it."""


@lru_cache(maxsize=32)
def lexer_for(language: str) -> Lexer | None:
    """Return the lexer of a language as named after a code fence, or None if Pygments does not know it."""
    if not language:
        return None
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        return None


def color_runs(lexer: Lexer, code: str) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, role) of the characters of `code` that have a colour of their own, in order.

    Code that is too long, or has too long a line, has none.
    """
    if len(code) > MAX_COLORED_CHARACTERS or any(len(line) > MAX_COLORED_LINE for line in code.split("\n")):
        return
    start = end = 0
    role = ""
    for token_type, text in lexer.get_tokens(code):
        next_role = _role(token_type)
        if next_role != role:
            if role and end > start:
                yield start, end, role
            start, role = end, next_role
        end = min(end + len(text), len(code))
    if role and end > start:
        yield start, end, role


@lru_cache(maxsize=8)
def code_palette(theme: Theme) -> dict[str, str]:
    """Return the colour of each role as `#rrggbb`, readable on `code_background`."""
    colors = {
        "comment": theme.muted,
        "keyword": theme.series[6],
        "string": theme.good,
        "number": theme.series[1],
        "type": theme.series[0],
        "function": theme.accent,
        "deleted": theme.bad,
    }
    return {role: _readable(color, theme) for role, color in colors.items()}


def code_background(theme: Theme) -> str:
    return theme.base


def _readable(color: str, theme: Theme) -> str:
    """Return `color`, mixed with the theme's text colour until it is readable."""
    steps = (mix(color, theme.text, share / 10) for share in range(11))
    return next(step for step in steps if contrast_ratio(step, code_background(theme)) >= MIN_CONTRAST)


@lru_cache(maxsize=512)
def _role(token_type: object) -> str:
    name = str(token_type)
    while name:
        if name in _ROLES:
            return _ROLES[name]
        name = name.rpartition(".")[0]
    return ""
