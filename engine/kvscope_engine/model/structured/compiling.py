"""From what was asked for to a compiled grammar, and what is wrong with it in a line."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.structured import Structured

MAX_WHITESPACE: Final = 32
"""Characters between two parts of JSON, for a line and its indentation: a model may otherwise go on with them for
ever."""
_WHERE: Final = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: .*? is false: )?")
_REST: Final = re.compile(r"\s*The JSON string is.*$", re.DOTALL)


def compile_form(compiler: Any, form: Structured) -> Any:
    """XGrammar's compiled grammar, by its `GrammarCompiler`; may take long. Raises BadInput with the reason."""
    _check(form)
    try:
        return _compile(compiler, form)
    except (RuntimeError, ValueError, TypeError) as error:
        raise BadInput(f"{form.kind} is not accepted: {_reason(error)}") from None


def _compile(compiler: Any, form: Structured) -> Any:
    if form.kind == "json_schema":
        return compiler.compile_json_schema(form.text, max_whitespace_cnt=MAX_WHITESPACE)
    if form.kind == "json_object":
        return compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=MAX_WHITESPACE)
    if form.kind == "regex":
        return compiler.compile_regex(form.text)
    if form.kind == "choice":
        return compiler.compile_grammar("root ::= " + " | ".join(map(_literal, form.choices())))
    if form.kind == "structural_tag":
        return compiler.compile_structural_tag(form.text)
    return compiler.compile_grammar(form.text)


def _check(form: Structured) -> None:
    """What XGrammar would say at length."""
    try:
        form.text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"{form.kind} is not accepted: {form.text[error.start]!r} is no character") from None
    if form.kind != "json_schema":
        return
    try:
        schema = msgspec.json.decode(form.text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadInput(f"json_schema={form.text!r:.60} is not accepted: it is no JSON ({error})") from None
    if not isinstance(schema, dict | bool):
        raise BadInput(f"json_schema={form.text!r:.60} is not accepted: an object or a boolean is one")


def _literal(text: str) -> str:
    """As XGrammar's grammars write a string: escapes like JSON's, beyond the first plane in eight digits."""
    plain = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() or c in '"\\' else _escaped(c) for c in plain)


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def _reason(error: Exception) -> str:
    text = _REST.sub("", _WHERE.sub("", str(error)))
    return " ".join(text.split())[:300] or type(error).__name__
