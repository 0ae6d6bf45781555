"""Calls between tokens of their own, the arguments as JSON: DeepSeek's and Kimi's."""

from __future__ import annotations

from typing import Final

from kvscope_engine.http.tools.calls import Call, Tools, as_object, inside

DEEPSEEK: Final = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
DEEPSEEK_SEPARATOR: Final = "<｜tool▁sep｜>"
KIMI: Final = ("<|tool_call_begin|>", "<|tool_call_end|>")
KIMI_SEPARATOR: Final = "<|tool_call_argument_begin|>"


def read_deepseek_v3(text: str, tools: Tools) -> list[Call] | None:
    """One: a kind, its name on the same line, and the arguments in a fence."""
    _, separator, rest = inside(text, *DEEPSEEK).partition(DEEPSEEK_SEPARATOR)
    name, _, body = rest.partition("\n")
    body = body.strip()
    return _call(name, body.removeprefix("```json").removeprefix("```").removesuffix("```")) if separator else None


def read_deepseek_v31(text: str, tools: Tools) -> list[Call] | None:
    """One: its name and its arguments."""
    name, separator, body = inside(text, *DEEPSEEK).partition(DEEPSEEK_SEPARATOR)
    return _call(name, body) if separator else None


def read_kimi(text: str, tools: Tools) -> list[Call] | None:
    """One, whose id `functions.NAME:3` says its name; the model looks for that id in the result's turn."""
    call_id, separator, body = inside(text, *KIMI).partition(KIMI_SEPARATOR)
    name, _, number = call_id.strip().rpartition(":")
    if not separator or not number.isdigit():
        return None
    return _call(name.removeprefix("functions."), body, call_id.strip())


def _call(name: str, body: str, call_id: str = "") -> list[Call] | None:
    name, arguments = name.strip(), as_object(body)
    return [Call(name, arguments, call_id)] if arguments is not None and len(name.split()) == 1 else None
