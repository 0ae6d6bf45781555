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
    """A complete call. `arguments` is a JSON object as text; `call_id` is the model's own, where its format has one."""

    name: str
    arguments: str
    call_id: str = ""


def decoded(text: str) -> Any:
    """Return the JSON value of `text`, or None if it is not JSON."""
    try:
        return msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def encoded(value: Any) -> str:
    """Return `value` as JSON. Raises the errors of msgspec for a value that has no JSON form."""
    return msgspec.json.encode(value).decode()


def as_object(value: Any) -> str | None:
    """Return a call's arguments as the text of a JSON object, or None if they are not an object.

    `value` is decoded JSON. Models also write no arguments (None) and an object as a string, as OpenAI's API does.
    """
    if isinstance(value, str):
        text = value.strip() or "{}"
        return text if isinstance(decoded(text), dict) else None
    value = {} if value is None else value
    return encoded(value) if isinstance(value, dict) else None


def field_value(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of an argument written without quotes: text if `schema` says so, else JSON if it is JSON."""
    properties = schema.get("properties")
    kind = properties.get(name) if isinstance(properties, Mapping) else None
    if isinstance(kind, Mapping) and kind.get("type") == "string":
        return text
    try:
        return msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, ValueError, RecursionError):
        return text
