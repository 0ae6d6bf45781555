"""The form of an answer that must be calls: a structural tag in the model's own way of writing them.

Without such a way, or where its marks are tokens that no form may have, calls are a JSON list.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from kvscope_engine.http.shapes.bodies import Function
from kvscope_engine.http.tools.formats import NAME, PLAIN, Forced, ToolFormat

MAX_WHITESPACE: Final = 32
"""Characters between two parts of arguments: a model may otherwise go on with them for ever."""
PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


def forced_format(tool_format: ToolFormat, functions: Sequence[Function], special: Collection[str]) -> ToolFormat:
    """How calls of `functions` are written where they must be; `special` are the tokens that no text shows."""
    has_names = all(PLAIN_NAME.fullmatch(function.name) for function in functions)
    if tool_format.can_force and has_names and not any(text and text in tool_format.marks for text in special):
        return tool_format
    return replace(PLAIN, has_short_ids=tool_format.has_short_ids)


def structural_tag(forced: Forced, functions: Sequence[Function], *, is_one: bool) -> str:
    """As XGrammar reads it: one call, or one and more."""
    calls = {
        "type": "tags_with_separator",
        "tags": [_tag(forced, function) for function in functions],
        "separator": forced.between,
        "at_least_one": True,
        "stop_after_first": is_one,
    }
    parts = [*_text(forced.before), calls, *_text(forced.after)]
    return msgspec.json.encode(
        {"type": "structural_tag", "format": {"type": "sequence", "elements": parts} if len(parts) > 1 else calls}
    ).decode()


def _tag(forced: Forced, function: Function) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "type": "json_schema",
        "json_schema": function.parameters or {"type": "object"},
        "style": forced.style,
        "max_whitespace_cnt": MAX_WHITESPACE,
    }
    if forced.arguments:
        parts = [{"type": "regex", "pattern": "[0-9]{1,3}"}, *_text(forced.arguments), arguments]
        arguments = {"type": "sequence", "elements": parts}
    name = msgspec.json.encode(function.name).decode()[1:-1]
    return {"type": "tag", "begin": forced.begin.replace(NAME, name), "content": arguments, "end": forced.end}


def _text(text: str) -> list[dict[str, Any]]:
    return [{"type": "const_string", "value": text}] if text else []
