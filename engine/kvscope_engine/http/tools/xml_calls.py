"""Calls as XML's fields, without its quotes: Qwen3-Coder's `<function=…><parameter=…>` and GLM's `<arg_key>`.

Cut by plain searches: what a model writes has no bound that a pattern's backtracking could live with.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvscope_engine.http.tools.calls import Call, Tools, encoded, field_value, inside

Fields = Iterator[tuple[str, str] | None]
"""Names and values; None for what is no field."""


def read_qwen3_coder(text: str, tools: Tools) -> list[Call] | None:
    """One, between `<tool_call>` and `</tool_call>`."""
    inner = inside(text, "<tool_call>", "</tool_call>")
    name, is_named, body = inner.removeprefix("<function=").partition(">")
    if not inner.startswith("<function=") or not is_named or "\n" in name.strip():
        return None
    return _call(name.strip(), _parameters(body.rstrip().removesuffix("</function>")), tools)


def read_glm(text: str, tools: Tools) -> list[Call] | None:
    """One, between `<tool_call>` and `</tool_call>`."""
    name, key, fields = inside(text, "<tool_call>", "</tool_call>").partition("<arg_key>")
    name = name.strip()
    return None if len(name.split()) != 1 or "<" in name else _call(name, _pairs(key + fields), tools)


def _call(name: str, fields: Fields, tools: Tools) -> list[Call] | None:
    schema, found = tools.get(name, {}), list(fields)
    pairs = [pair for pair in found if pair is not None]
    if not name or len(pairs) != len(found):
        return None
    return [Call(name, encoded({key: field_value(value, key, schema) for key, value in pairs}))]


def _parameters(body: str) -> Fields:
    before, *fields = body.split("<parameter=")
    if before.strip():
        yield None
    for field in fields:
        key, is_named, value = field.partition(">")
        whole, close, rest = value.rpartition("</parameter>")
        is_field = is_named and not (close and rest.strip())
        value = whole if close else value.rstrip()
        yield (key.strip(), value.removeprefix("\n").removesuffix("\n")) if is_field else None


def _pairs(body: str) -> Fields:
    before, *fields = body.split("<arg_key>")
    if before.strip():
        yield None
    for field in fields:
        key, _, rest = field.partition("</arg_key>")
        value, close, rest = rest.lstrip().partition("</arg_value>")
        is_field = close and value.startswith("<arg_value>") and not rest.strip()
        yield (key.strip(), value.removeprefix("<arg_value>")) if is_field else None
