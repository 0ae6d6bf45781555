"""Compiles a request for structured output to an XGrammar grammar, with one-line errors.

Runs only in the process of a grammar: the code called here may run forever, or crash the process.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from kvscope_engine.structured_output.unenforced import unenforced, unenforced_in_tag
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.structured import Structured

OUT_OF_MEMORY: Final = "std::bad_alloc"
"""Text in XGrammar's exceptions when memory is exhausted."""
MAX_WHITESPACE: Final = 32
"""Maximum number of whitespace characters between two parts of JSON, for a line break and indentation: otherwise a
model may continue them forever."""
_WHERE: Final = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: .*? is false: )?")
_REST: Final = re.compile(r"\s*The JSON string is.*$", re.DOTALL)
_WARNING: Final = re.compile(r"^\[[\d:]+\] \S+:\d+: Warning: (.*)$", re.MULTILINE)
_MAX_HEARD: Final = 1 << 20
_HARMLESS: Final = ("oneOf with overlapping",)
"""Warnings that `unenforced` checks more precisely."""


def compile_form(compiler: Any, form: Structured) -> Any:
    """Return XGrammar's compiled grammar; may take long. Raises MemoryError, and BadInput with the reason.

    A grammar is refused if XGrammar warns on standard error, which is only used here, that it would not enforce a part.
    """
    _check(form)
    warnings: list[str] = []
    try:
        with _heard(warnings):
            compiled = _compile(compiler, form)
    except (RuntimeError, ValueError, TypeError) as error:
        if OUT_OF_MEMORY in str(error):
            raise MemoryError from None
        raise BadInput(f"{form.kind} is not accepted: {_reason(error)}") from None
    for warning in warnings:
        if not warning.startswith(_HARMLESS):
            raise BadInput(f"{form.kind} is not accepted, a part would not be enforced: {warning:.300}")
    return compiled


@contextmanager
def _heard(warnings: list[str]) -> Iterator[None]:
    """Capture standard error, and append the warnings in it to `warnings`."""
    before, heard = os.dup(2), os.memfd_create("warnings")
    os.dup2(heard, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        with open(heard, "rb") as file:
            file.seek(0)
            warnings += _WARNING.findall(file.read(_MAX_HEARD).decode(errors="replace"))


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
    """Raise BadInput for errors that XGrammar would report at length."""
    try:
        form.text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"{form.kind} is not accepted: {form.text[error.start]!r} is no character") from None
    if form.kind not in ("json_schema", "structural_tag"):
        return
    try:
        asked = msgspec.json.decode(form.text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadInput(f"{form.kind}={form.text!r:.60} is not accepted: it is no JSON ({error})") from None
    if form.kind == "json_schema" and not isinstance(asked, dict | bool):
        raise BadInput(f"json_schema={form.text!r:.60} is not accepted: an object or a boolean is one")
    found = unenforced(asked) if form.kind == "json_schema" else unenforced_in_tag(asked)
    if found:
        raise BadInput(f"{form.kind} is not accepted: {found}")


def _literal(text: str) -> str:
    """Return a string literal of XGrammar's grammars: escapes as in JSON, with eight digits above U+FFFF."""
    plain = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() or c in '"\\' else _escaped(c) for c in plain)


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def _reason(error: Exception) -> str:
    text = _REST.sub("", _WHERE.sub("", str(error)))
    return " ".join(text.split())[:300] or type(error).__name__
