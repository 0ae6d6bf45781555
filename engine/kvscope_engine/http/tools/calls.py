"""What all formats share: a call that was read, the tools that it may be of, and JSON of unknown shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's arguments, by its name."""


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments` is a JSON object as text; `call_id` the model's own, where its format has one."""

    name: str
    arguments: str
    call_id: str = ""


Read: TypeAlias = Callable[[str, Tools], "list[Call] | None"]
"""From a piece of an answer to the calls in it; None where it is anything else. Never raises."""


def decoded(text: str) -> Any:
    """JSON's value; None where it is none."""
    try:
        return msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def encoded(value: Any) -> str:
    """As JSON. Raises as msgspec does for what cannot be."""
    return msgspec.json.encode(value).decode()


def inside(text: str, begin: str, end: str) -> str:
    """What stands between both, either of which may be missing, without white space around."""
    return text.strip().removeprefix(begin).removesuffix(end).strip()


def as_object(text: str) -> str | None:
    """`text` without its ends, if it is a JSON object; empty is one without fields."""
    text = text.strip() or "{}"
    return text if isinstance(decoded(text), dict) else None


def field_value(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """Of an argument that is written without quotes: text where `schema` says so, else JSON where it is some."""
    properties = schema.get("properties")
    kind = properties.get(name) if isinstance(properties, Mapping) else None
    if isinstance(kind, Mapping) and kind.get("type") == "string":
        return text
    try:
        return msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, ValueError, RecursionError):
        return text
