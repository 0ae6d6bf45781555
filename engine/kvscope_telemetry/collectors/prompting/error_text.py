"""Extracts a one-line message from a server's error answer, in any of the usual formats. Uses no sockets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvscope_telemetry.printable import printable

MAX_CHARACTERS: Final = 300
_MESSAGE_FIELDS: Final = ("error", "message", "detail", "msg")
_MAX_DEPTH: Final = 4


def error_text_of_body(body: bytes) -> str:
    """Return the message in an error answer: OpenAI's or FastAPI's error object, or plain text; empty if there
    is none.
    """
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        text = body.decode("utf-8", errors="replace").strip()
        return "" if text.startswith("<") else one_line(text)  # an HTML page, such as a proxy's, has no message
    return error_text_of_document(document)


def error_text_of_document(document: Any, depth: int = 0) -> str:
    """Return the message of an error answer that was decoded from JSON; empty if there is none."""
    if isinstance(document, str):
        return one_line(document)
    if depth == _MAX_DEPTH:
        return ""
    if isinstance(document, list) and document:
        return error_text_of_document(document[0], depth + 1)
    if isinstance(document, Mapping):
        return next(
            filter(None, (error_text_of_document(document.get(name), depth + 1) for name in _MESSAGE_FIELDS)), ""
        )
    return ""


def one_line(text: str) -> str:
    """Return `text` as printable text on one line, truncated to `MAX_CHARACTERS` characters."""
    line = " ".join(text[: 4 * MAX_CHARACTERS].split())
    printable_line = printable(line)
    return printable_line if len(printable_line) <= MAX_CHARACTERS else f"{printable_line[:MAX_CHARACTERS]}…"
