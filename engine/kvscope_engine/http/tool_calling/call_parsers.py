"""Parsers for the text of tool calls, which a format encloses in marks such as `<tool_call>` and `</tool_call>`. The
text is JSON, JSON after a name, Python, or named fields.

Each parser is a search in a growing text. It ends where the calls are complete, and ignores marks within strings, so
that a truncated call is never returned.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from kvscope_engine.http.tool_calling.streamed_text import JSON_TOKENS, PYTHON_TOKENS, Search, StreamedText
from kvscope_engine.http.tool_calling.tool_call import (
    ParsedCall,
    Tools,
    arguments_text,
    field_value,
    parse_json,
    to_json,
)

WHITESPACE: Final = " \t\r\n"
SEPARATORS: Final = f"{WHITESPACE},;"
MAX_PYTHON_CHARACTERS: Final = 1 << 20
PYTHON_NAMES: Final = {"true": True, "false": False, "null": None}
"""Python values of JSON's constants, which models also write in calls in Python syntax."""


class ParseResult(NamedTuple):
    """Parsed tool calls, and the index in the text at which they end. If `calls` is None, the text up to `end` contains
    no call.
    """

    calls: list[ParsedCall] | None
    end: int


CallParser: TypeAlias = Callable[[StreamedText, int, Tools], Search[ParseResult]]


def read_json(text: StreamedText, start: int, tools: Tools) -> Search[ParseResult]:
    """Read JSON tool calls, or lists of them, in succession until other text follows."""
    calls: list[ParsedCall] = []
    while True:
        start = yield from text.skip(SEPARATORS if calls else WHITESPACE, start)
        if text.text[start : start + 1] not in ("{", "["):
            return ParseResult(calls or None, start)
        result = yield from read_json_value(text, start, tools)
        if result.calls is None:
            return result
        calls += result.calls
        start = result.end


def read_json_value(text: StreamedText, start: int, tools: Tools) -> Search[ParseResult]:
    """Read one tool call `{"name": ..., "arguments": {...}}` (Llama: `parameters`), or a list of them."""
    start = yield from text.skip(WHITESPACE, start)
    if text.text[start : start + 1] not in ("{", "["):
        return ParseResult(None, start)
    end = yield from text.closing(JSON_TOKENS, start)
    value = parse_json(text.text[start:end])
    calls = [_json_call(one) for one in (value if isinstance(value, list) else [value])]
    complete = [call for call in calls if call is not None]
    return ParseResult(complete if complete and len(complete) == len(calls) else None, end)


def read_keyed_json(text: StreamedText, start: int, tools: Tools) -> Search[ParseResult]:
    """Read a list of calls `[{NAME: {...}}, ...]`, whose keys are the functions' names."""
    start = yield from text.skip(WHITESPACE, start)
    if text.text[start : start + 1] != "[":
        return ParseResult(None, start)
    end = yield from text.closing(JSON_TOKENS, start)
    value = parse_json(text.text[start:end])
    calls: list[ParsedCall] = []
    for one in value if isinstance(value, list) else ():
        for name, given in one.items() if isinstance(one, dict) else ():
            arguments = arguments_text(given)
            if arguments is None:
                return ParseResult(None, end)
            calls.append(ParsedCall(name, arguments))
    return ParseResult(calls or None, end)


def any_of(*bodies: CallParser) -> CallParser:
    """Return a parser that tries `bodies` in order, until one of them has consumed text or found calls."""

    def read(text: StreamedText, start: int, tools: Tools) -> Search[ParseResult]:
        result = ParseResult(None, start)
        for body in bodies:
            if result.calls is None and not text.text[start : result.end].strip():
                result = yield from body(text, start, tools)
        return result

    return read


def _json_call(value: Any) -> ParsedCall | None:
    name = value.get("name", value.get("tool_name")) if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return None
    arguments = arguments_text(value.get("arguments", value.get("parameters")))
    return None if arguments is None else ParsedCall(name, arguments)


@dataclass(frozen=True, slots=True)
class NamedJson:
    """Parser for tool calls that consist of a head with the function's name and a JSON object with the arguments.

    The pattern `head` has the group `name`, and the group `id` if calls have ids.
    """

    head: re.Pattern[str]

    def __call__(self, text: StreamedText, start: int, tools: Tools) -> Search[ParseResult]:
        head = yield from text.match(self.head, start)
        if head is None:
            return ParseResult(None, start)
        end = yield from text.closing(JSON_TOKENS, head.end())
        arguments = arguments_text(text.text[head.end() : end])
        if arguments is None:
            return ParseResult(None, end)
        return ParseResult([ParsedCall(head["name"], arguments, head.groupdict().get("id") or "")], end)


class NamedValues:
    """Parser for a name and an object with unquoted keys, as in `call:NAME{KEY:<|"|>TEXT<|"|>,KEY:[1,true]}`.

    `quote` is the string before and after each text value. Nothing is escaped in these values.
    """

    def __init__(self, quote: str) -> None:
        mark = re.escape(quote)
        self._longest_token = len(quote)
        self._tokens = re.compile(rf"{mark}|[\[\]{{}}]")
        self._parts = re.compile(
            rf'{mark}(?P<text>.*?){mark}|(?P<json>"(?:\\.|[^"\\])*")|(?P<word>[^\s{{}}\[\],:]+)|(?P<sign>[{{}}\[\],:])',
            re.DOTALL,
        )

    def __call__(self, text: StreamedText, start: int, tools: Tools) -> Search[ParseResult]:
        head = yield from text.match(_VALUES_HEAD, start)
        if head is None:
            return ParseResult(None, start)
        end = yield from text.closing(self._tokens, head.end(), self._longest_token)
        arguments = arguments_text(self._as_json(text.text[head.end() : end]))
        return ParseResult(None if arguments is None else [ParsedCall(head["name"], arguments)], end)

    def _as_json(self, text: str) -> str:
        parts = []
        for part in self._parts.finditer(text):
            is_key = text[part.end() : part.end() + 1] == ":"
            if part["text"] is not None:
                parts.append(to_json(part["text"]))
            elif (word := part["word"]) is not None:
                parts.append(to_json(word) if is_key else _bare_value(word))
            else:
                parts.append(part[0])
        return "".join(parts)


def _bare_value(word: str) -> str:
    """Return a value without quotes as JSON: null, a number or a boolean; other words are text."""
    if word in ("null", "None"):
        return "null"
    return word if parse_json(word) is not None else to_json(word)


_VALUES_HEAD: Final = re.compile(r"\s*call:\s*(?P<name>[\w.-]+)\s*(?=\{)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFields:
    """Parser for tool calls with a name and unquoted fields:
    `<function=NAME><parameter=KEY>VALUE</parameter></function>`.

    A value ends at a `close` that is followed by the next field or by `tail`; any other `close` is part of the value.
    These formats cannot distinguish the end of a value from the same text inside it.
    """

    head: re.Pattern[str]
    """Pattern that matches from the call's beginning through the function's name, with the group `name`."""
    field_begin: str
    """Text with which every field begins."""
    field: re.Pattern[str]
    """Pattern that matches a field from `field_begin` up to its value, with the group `key`. If it has a group `text`
    that matches, the value is text even if it looks like JSON.
    """
    close: str
    """Text after a field's value."""
    tail: str
    """Text after the last field, which ends the call."""
    has_value_lines: bool = False
    """Whether a value is on lines of its own, so that a line break at its start and one at its end do not belong to it.
    """

    def __call__(self, text: StreamedText, start: int, tools: Tools) -> Search[ParseResult]:
        head = yield from text.match(self.head, start)
        if head is None:
            return ParseResult(None, start)
        name, end = head["name"].strip(), head.end()
        schema, arguments = tools.get(name, {}), {}
        mark, after = yield from text.expect((self.field_begin, self.tail), end)
        while mark == self.field_begin:
            field = yield from text.match(self.field, after - len(mark))
            if field is None:
                return ParseResult(None, end)
            value_end, mark, after = yield from self._find_value_end(text, field.end())
            value, end = text.text[field.end() : value_end], value_end + len(self.close)
            if self.has_value_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            key, is_text = field["key"].strip(), bool(field.groupdict().get("text"))
            arguments[key] = value if is_text else field_value(value, key, schema)
        if not mark:
            return ParseResult(None, end)
        return ParseResult([ParsedCall(name, to_json(arguments))], after)

    def _find_value_end(self, text: StreamedText, start: int) -> Search[tuple[int, str, int]]:
        """Find the end of the value that begins at `start`.

        Returns the index of the `close` after the value, the mark that follows it (`field_begin` or `tail`), and the
        index after that mark.
        """
        end = start
        while True:
            close_index = yield from text.find(self.close, end)
            end = close_index + len(self.close)
            mark, after = yield from text.expect((self.field_begin, self.tail), end)
            if mark:
                return close_index, mark, after


def read_python(text: StreamedText, start: int, tools: Tools) -> Search[ParseResult]:
    """Read Python calls such as `[weather(city="Rome", days=3)]`, in lists or one per line. Calls of functions that are
    not in `tools` are ignored.

    The calls are parsed as expressions of constants; nothing is ever executed.
    """
    calls: list[ParsedCall] = []
    while True:
        start = yield from text.skip(SEPARATORS if calls else WHITESPACE, start)
        first = text.text[start : start + 1]
        head = (yield from text.match(_PYTHON_HEAD, start)) if first == "[" or first.isidentifier() else None
        if head is None:
            return ParseResult(calls or None, start)
        end = yield from text.closing(PYTHON_TOKENS, head.end())
        parsed = _python_calls(text.text[start:end])
        if not parsed or any(call.name not in tools for call in parsed):
            return ParseResult(None, end)
        calls += parsed
        start = end


_PYTHON_HEAD: Final = re.compile(r"(?=\[)|[^\W\d][\w.]*(?=\()")


def _python_calls(text: str) -> list[ParsedCall]:
    if len(text) > MAX_PYTHON_CHARACTERS:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)  # escapes that Python does not know
            tree = ast.parse(text, mode="eval").body
        return [_python_call(node) for node in (tree.elts if isinstance(tree, ast.List) else [tree])]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError, OverflowError):
        return []


def _python_call(node: ast.expr) -> ParsedCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with arguments by name")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("an argument without a name")
        arguments[keyword.arg] = _python_value(keyword.value)
    return ParsedCall(_python_name(node.func), to_json(arguments))


def _python_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_python_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("not a name")


def _python_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in PYTHON_NAMES:
        return PYTHON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _python_value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("not an object of JSON")
        return dict(zip(keys, map(_python_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("not a value of JSON")
    return value
