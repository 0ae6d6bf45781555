"""Calls as JSON: `{"name": …, "arguments": {…}}`, a list of them, or several after one another.

Hermes and Qwen write one between tags, Llama 3 `parameters` for `arguments`, Mistral, Granite and Phi a list.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from kvscope_engine.http.tools.calls import Call, Read, Tools, as_object, decoded, encoded

PARTS: Final = "; ,\n\r\t"


def after(*prefixes: str, ends: Sequence[str] = ()) -> Read:
    """Reads JSON between any of `prefixes` and of `ends`."""

    def read(text: str, tools: Tools) -> list[Call] | None:
        return _calls(_within(text, prefixes, ends))

    return read


def read_mistral(text: str, tools: Tools) -> list[Call] | None:
    """A list after `[TOOL_CALLS]`, or a name and its arguments after each."""
    calls: list[Call] = []
    for part in text.split("[TOOL_CALLS]"):
        if not part.strip():
            continue
        found = _calls(part) or _named(part)
        if found is None:
            return None
        calls += found
    return calls or None


def _named(text: str) -> list[Call] | None:
    """Mistral's newer way: `weather{…}`, `weather[ARGS]{…}` or `weather[CALL_ID]a1b2c3d4e[ARGS]{…}`."""
    head, brace, rest = text.partition("{")
    name, _, call_id = head.strip().removesuffix("[ARGS]").partition("[CALL_ID]")
    arguments = as_object(brace + rest) if brace else None
    if (
        arguments is None
        or len(name.split()) != 1
        or not name.strip().replace("-", "_").replace(".", "_").isidentifier()
    ):
        return None
    return [Call(name.strip(), arguments, call_id.strip())]


def _within(text: str, prefixes: Sequence[str], ends: Sequence[str]) -> str:
    text = text.strip()
    for prefix in prefixes:
        text = text.removeprefix(prefix).lstrip()
    for end in ends:
        text = text.removesuffix(end).rstrip()
    return text


def _calls(text: str) -> list[Call] | None:
    found = decoded(text)
    values = found if isinstance(found, list) else [found] if found is not None else _several(text)
    calls = [_call(one) for one in values]
    whole = [call for call in calls if call is not None]
    return whole if whole and len(whole) == len(calls) else None


def _several(text: str) -> list[Any]:
    """Objects after one another, parted by semicolons, commas or white space; none where there is anything else."""
    values: list[Any] = []
    place, decoder = 0, json.JSONDecoder()
    text = text.strip(PARTS)
    while place < len(text):
        place += len(text[place:]) - len(text[place:].lstrip(PARTS))
        if text[place] != "{":
            return []
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return []
        values.append(value)
    return values


def _call(found: Any) -> Call | None:
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(name, str) or not name:
        return None
    arguments = found.get("arguments", found.get("parameters")) or {}
    return Call(name, arguments if isinstance(arguments, str) else encoded(arguments))
