"""Options for structured output: a JSON schema, any JSON object, a regex, a grammar, or choices. At most one may be
given.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.structured import Structured

NAMES: Final = ("json_schema", "json_object", "regex", "grammar", "choice")
"""Names of the structured output options, which are also fields of a line in a prompts file."""


def add_structured_output_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("structured output (one of these)").add_argument
    add("--json-schema", metavar="FILE|JSON", help="make the answer match a JSON schema, given as JSON or in a file")
    add("--json-object", action="store_true", help="make the answer a JSON object")
    add("--regex", metavar="REGEX", help="make the whole answer match a regular expression")
    add(
        "--grammar",
        metavar="FILE|GBNF",
        help="make the answer match an EBNF grammar with a rule named root, given as text or in a file",
    )
    add(
        "--choice",
        action="append",
        default=[],
        metavar="TEXT",
        help="make the answer one of the given texts; repeatable",
    )


def structured(args: argparse.Namespace) -> Structured | None:
    """Return the requested structured output, or None if none is requested.

    Raises BadInput for several options, and for a file that cannot be read.
    """
    options = {name: value for name in NAMES if (value := getattr(args, name))}
    for name in ("json_schema", "grammar"):
        if name in options:
            options[name] = _text_or_file(options[name], "::=" if name == "grammar" else "{")
    return structured_from_options(options)


def structured_from_options(options: Mapping[str, Any]) -> Structured | None:
    """Return the structured output that a line of a prompts file requests, or None if it requests none. The line's
    schema may be a JSON object.

    Raises BadInput for invalid options.
    """
    requested = {name: options[name] for name in NAMES if options.get(name) not in (None, False, [])}
    if not requested:
        return None
    if len(requested) > 1:
        raise BadInput(f"one form of the answer is accepted, not {' and '.join(requested)}")
    ((kind, value),) = requested.items()
    if kind == "json_object":
        text = ""
    elif kind == "choice" or (kind == "json_schema" and not isinstance(value, str)):
        text = json.dumps(value, ensure_ascii=False)
    else:
        text = value
    try:
        return msgspec.convert({"kind": kind, "text": text}, Structured)
    except msgspec.ValidationError as error:
        raise BadInput(str(error)) from None


def _text_or_file(value: str, mark: str) -> str:
    """Return `value` itself if it contains the string `mark`. Otherwise, return the contents of the file at the
    path `value`.
    """
    if mark in value:
        return value
    try:
        return Path(value).read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadInput(f"{value!r:.80} is neither a text with {mark!r} nor a file that can be read: {reason}") from None
