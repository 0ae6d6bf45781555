"""Markdown as models write it, adapted for Qt's renderer. Imports no Qt."""

from __future__ import annotations

import re
from typing import Final

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
CONTINUED_LINE_MARK: Final = " \ue000"
"""Suffix of a line that is followed by a line of the same paragraph. Qt makes each line a paragraph; where
the mark is, the renderer removes the spacing between them.
"""
_RULE_CHARACTERS: Final = frozenset("-=_*:| ")
_PUNCTUATION: Final = re.compile(r"([!-/:-@\[-`{-~])")


def chat_markdown(text: str) -> str:
    r"""Return Markdown that renders `text` as models intend it.

    Line breaks stay line breaks. Formulas (`\(...\)`, `\[...\]`, `$...$`, `$$...$$`) keep their backslashes,
    underscores and asterisks. An image, which is never loaded, becomes a link with its alternative text. Code is
    unchanged.
    """
    return _MARKDOWN_PARTS.sub(_markdown_of, text)


def _markdown_of(match: re.Match[str]) -> str:
    if match["math"]:
        return _PUNCTUATION.sub(r"\\\1", match["math"]).replace("\n", "  \n")
    if match["alt"] is not None:
        return f"[Image: {match['alt'] or 'no description'}]({match['address']})"
    if match["newline"]:
        line = match.string[match.string.rfind("\n", 0, match.start()) + 1 : match.start()]
        return "  \n" if line.endswith("|") or _RULE_CHARACTERS.issuperset(line) else f"{CONTINUED_LINE_MARK}  \n"
    return match[0]
