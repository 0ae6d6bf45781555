"""What a server says that went wrong, whichever way it says it: one line for a person. Knows no sockets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

MAX_LETTERS: Final = 300
_NAMES: Final = ("error", "message", "detail", "msg")
_MAX_DEPTH: Final = 4


def error_text(body: bytes) -> str:
    """Of OpenAI's error object, of FastAPI's, of plain text; empty where it says nothing that can be read."""
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        text = body.decode("utf-8", errors="replace").strip()
        return "" if text.startswith("<") else one_line(text)
    return error_text_of_body(told)


def error_text_of_body(told: Any, depth: int = 0) -> str:
    """The same, decoded."""
    if isinstance(told, str):
        return one_line(told)
    if depth == _MAX_DEPTH:
        return ""
    if isinstance(told, list) and told:
        return error_text_of_body(told[0], depth + 1)
    if isinstance(told, Mapping):
        return next(filter(None, (error_text_of_body(told.get(name), depth + 1) for name in _NAMES)), "")
    return ""


def one_line(text: str) -> str:
    """Printable and short."""
    words = " ".join(text[: 4 * MAX_LETTERS].split())
    shown = "".join(letter if letter.isprintable() else "?" for letter in words)
    return shown if len(shown) <= MAX_LETTERS else f"{shown[:MAX_LETTERS]}…"
