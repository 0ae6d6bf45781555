"""A tool call that was parsed from an answer, and the JSON of its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schema of each function's arguments, by the function's name."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete tool call. `arguments` is a JSON object as text; `call_id` is the id that the model wrote, or "" if
    its format has no ids.
    """

    name: str
    arguments: str
    call_id: str = ""


def parse_json(text: str) -> Any:
    """Return the JSON value of `text`, or None if it is not JSON."""
    try:
        return msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def arguments_text(value: Any) -> str | None:
    """Return a tool call's arguments as the text of a JSON object; None if they are not an object.

    `value` is decoded JSON. Some models write None for missing arguments, or an object as a string, as in OpenAI's API.
    """
    if isinstance(value, str):
        text = value.strip() or "{}"
        return text if isinstance(parse_json(text), dict) else None
    value = {} if value is None else value
    return to_json(value) if isinstance(value, dict) else None


def field_value(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of an unquoted argument: text if `schema` says string, else JSON if it is valid JSON, else
    text.
    """
    properties = schema.get("properties")
    kind = properties.get(name) if isinstance(properties, Mapping) else None
    if isinstance(kind, Mapping) and kind.get("type") == "string":
        return text
    try:
        return msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, ValueError, RecursionError):
        return text
