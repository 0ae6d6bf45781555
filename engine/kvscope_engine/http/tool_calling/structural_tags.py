"""Structural tags (XGrammar) that force an answer to be tool calls in the model's own format.

Calls are forced as a JSON list if the model's format is unknown, or if its marks are special tokens, which structured
output cannot produce.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from kvscope_engine.http.schemas.request_bodies import Function
from kvscope_engine.http.tool_calling.tool_call_formats import (
    JSON_LIST_FORMAT,
    NAME_PLACEHOLDER,
    ForcedFormat,
    ToolFormat,
)

MAX_WHITESPACE: Final = 32
"""Maximum number of consecutive white space characters in forced arguments. A model might otherwise emit them forever.
"""
PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


def forced_format(tool_format: ToolFormat, functions: Sequence[Function], special: Collection[str]) -> ToolFormat:
    """Return the format in which the model is forced to call one of `functions`. `special`: texts of the tokenizer's
    special tokens.
    """
    has_names = all(PLAIN_NAME.fullmatch(function.name) for function in functions)
    if tool_format.can_force and has_names and not any(text and text in tool_format.marks for text in special):
        return tool_format
    return replace(JSON_LIST_FORMAT, has_short_ids=tool_format.has_short_ids)


def structural_tag(forced: ForcedFormat, functions: Sequence[Function], *, is_one: bool) -> str:
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


def _tag(forced: ForcedFormat, function: Function) -> dict[str, Any]:
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
    return {
        "type": "tag",
        "begin": forced.begin.replace(NAME_PLACEHOLDER, name),
        "content": arguments,
        "end": forced.end,
    }


def _text(text: str) -> list[dict[str, Any]]:
    return [{"type": "const_string", "value": text}] if text else []
