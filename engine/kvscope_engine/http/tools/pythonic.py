"""Calls as Python writes them: `[weather(city="Rome", days=3)]`, of Llama 3.2, Llama 4, OLMo 3 and others.

Read as an expression of constants alone: nothing is ever run.
"""

from __future__ import annotations

import ast
import warnings
from typing import Any, Final

from kvscope_engine.http.tools.calls import Call, Tools, encoded

MAX_CHARACTERS: Final = 1 << 20
NAMES: Final = {"true": True, "false": False, "null": None}
"""Of JSON, which models write for Python's."""
TAGS: Final = (("<|python_start|>", "<|python_end|>"), ("<function_calls>", "</function_calls>"))


def read_pythonic(text: str, tools: Tools) -> list[Call] | None:
    """A list of calls, one call, or one a line; of tools that there are."""
    inner = text.strip()
    for begin, end in TAGS:
        inner = inner.removeprefix(begin).removesuffix(end).strip()
    tree = _parsed(inner)
    if tree is None:
        tree = _parsed("[" + ",".join(line for line in inner.splitlines() if line.strip()) + "]")
    nodes = tree.elts if isinstance(tree, ast.List) else [tree]
    try:
        calls = [_call(node) for node in nodes]
    except (ValueError, TypeError, RecursionError, OverflowError):
        return None
    return calls if calls and all(call.name in tools for call in calls) else None


def _parsed(text: str) -> ast.expr | None:
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)  # of escapes that Python does not know
            return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _call(node: ast.expr | None) -> Call:
    """Raises ValueError for what is no call with constants by name."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call by names")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("no name")
        arguments[keyword.arg] = _value(keyword.value)
    return Call(_name(node.func), encoded(arguments))


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("no name")


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in NAMES:
        return NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("no object of JSON")
        return dict(zip(keys, map(_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no value of JSON")
    return value
