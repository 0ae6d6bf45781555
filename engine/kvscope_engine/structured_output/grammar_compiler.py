"""Compiles a request for structured output to an XGrammar grammar, with one-line errors.

Runs only in the grammar's own process, because XGrammar may run forever or crash the process.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from kvscope_engine.structured_output.json_schema_check import unenforced, unenforced_in_tag
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.structured import Structured
from kvscope_telemetry.printable import valid_text

OUT_OF_MEMORY: Final = "std::bad_alloc"
"""Text in XGrammar's exceptions if memory is exhausted."""
MAX_WHITESPACE: Final = 32
"""Maximum number of whitespace characters between two tokens of JSON syntax, enough for a line break and
indentation. Without a limit, a model may generate whitespace forever.
"""
_SOURCE_LOCATION: Final = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: .*? is false: )?")
_TRAILING_JSON: Final = re.compile(r"\s*The JSON string is.*$", re.DOTALL)
_WARNING: Final = re.compile(r"^\[[\d:]+\] \S+:\d+: Warning: (.*)$", re.MULTILINE)
_MAX_WARNING_BYTES: Final = 1 << 20
_IGNORED_WARNINGS: Final = ("oneOf with overlapping",)
"""First words of XGrammar warnings that are ignored, because `json_schema_check` checks the same cases more
precisely.
"""


def compile_grammar(compiler: Any, spec: Structured) -> Any:
    """Return XGrammar's compiled grammar for `spec`; may take long. Raises BadInput with the reason, or MemoryError.

    A grammar is refused if XGrammar warns on standard error that it would not enforce a part of it. No other code
    writes to standard error in this process.
    """
    _check(spec)
    warnings: list[str] = []
    try:
        with _capturing_warnings(warnings):
            grammar = _compile(compiler, spec)
    except (RuntimeError, ValueError, TypeError) as error:
        if OUT_OF_MEMORY in str(error):
            raise MemoryError from None
        raise BadInput(f"{spec.kind} is not accepted: {_reason(error)}") from None
    for warning in warnings:
        if not warning.startswith(_IGNORED_WARNINGS):
            raise BadInput(f"{spec.kind} is not accepted, a part would not be enforced: {warning:.300}")
    return grammar


@contextmanager
def _capturing_warnings(warnings: list[str]) -> Iterator[None]:
    before, captured = os.dup(2), os.memfd_create("warnings")
    os.dup2(captured, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        with open(captured, "rb") as file:
            file.seek(0)
            warnings += _WARNING.findall(file.read(_MAX_WARNING_BYTES).decode(errors="replace"))


def _compile(compiler: Any, spec: Structured) -> Any:
    if spec.kind == "json_schema":
        return compiler.compile_json_schema(spec.text, max_whitespace_cnt=MAX_WHITESPACE)
    if spec.kind == "json_object":
        return compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=MAX_WHITESPACE)
    if spec.kind == "regex":
        return compiler.compile_regex(spec.text)
    if spec.kind == "choice":
        return compiler.compile_grammar("root ::= " + " | ".join(map(_literal, spec.choices())))
    if spec.kind == "structural_tag":
        return compiler.compile_structural_tag(spec.text)
    return compiler.compile_grammar(spec.text)


def _check(spec: Structured) -> None:
    """Raise BadInput with a short text for errors that XGrammar would report at length."""
    valid_text(spec.text, name=spec.kind)
    if spec.kind not in ("json_schema", "structural_tag"):
        return
    try:
        schema = msgspec.json.decode(spec.text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadInput(f"{spec.kind}={spec.text!r:.60} is not accepted: it is no JSON ({error})") from None
    if spec.kind == "json_schema" and not isinstance(schema, dict | bool):
        raise BadInput(f"json_schema={spec.text!r:.60} is not accepted: must be an object or a boolean")
    fault = unenforced(schema) if spec.kind == "json_schema" else unenforced_in_tag(schema)
    if fault:
        raise BadInput(f"{spec.kind} is not accepted: {fault}")


def _literal(text: str) -> str:
    """Return `text` as a string literal in XGrammar's grammar syntax: escaped as in JSON, but with eight
    hexadecimal digits above U+FFFF.
    """
    plain = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() or c in '"\\' else _escaped(c) for c in plain)


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def _reason(error: Exception) -> str:
    text = _TRAILING_JSON.sub("", _SOURCE_LOCATION.sub("", str(error)))
    return " ".join(text.split())[:300] or type(error).__name__
