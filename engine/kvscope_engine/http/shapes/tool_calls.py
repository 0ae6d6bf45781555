"""The calls in a model's answer, as it streams: text that is none goes on, calls are told whole at their end.

Understood: Hermes' `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Qwen, Hermes and many more), and answers
that are JSON and nothing else, an object or an array with `name` and `parameters` or `arguments` (Llama 3, Mistral),
after `<|python_tag|>` or `[TOOL_CALLS]` or without. Not understood, and left in the text: calls written as Python
(Llama 3.2, Llama 4), as XML fields (Qwen3-Coder), DeepSeek's and Kimi's own tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from kvscope_engine.http.shapes.answers import CalledFunction, CalledTool

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
PREFIXES: Final = ("<|python_tag|>", "[TOOL_CALLS]")
MAX_CALLS: Final = 128


@dataclass(slots=True)
class ToolCallReader:
    """Of one answer; `names` are the functions it may call."""

    names: Collection[str]
    num_calls: int = 0
    _held: str = ""
    _is_json: bool | None = None
    """Whether the answer may be JSON from its first character on; None before there is any."""
    _is_after_call: bool = False
    """Whether nothing but white space came since the last call."""
    _calls: list[CalledTool] = field(default_factory=list)

    def add(self, text: str) -> tuple[str, list[CalledTool]]:
        """Text that can be told, and calls that are whole."""
        self._held += text
        if self._is_after_call:
            self._held = self._held.lstrip()  # what parts one call from the next is no text
            self._is_after_call = not self._held
        if self._is_json is None:
            begin = self._held.lstrip()
            if begin and not any(prefix.startswith(begin) for prefix in PREFIXES):
                self._is_json = begin.startswith(("{", "[", *PREFIXES))
        if self._is_json is not False:
            return "", []
        return self._hermes(), self._take()

    def flush(self) -> tuple[str, list[CalledTool]]:
        """The rest, at the end of the answer."""
        held, self._held = self._held, ""
        if self._is_json and self._all_json(held):
            return "", self._take()
        if held.startswith(OPEN) and self._call(held.removeprefix(OPEN)):  # the last was cut before its end
            held = ""
        return held, self._take()

    def _hermes(self) -> str:
        """Take whole calls out of what is held; the text around them."""
        told = ""
        while (start := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, start)
            told, self._held = told + self._held[:start], self._held[start:]
            if end < 0:
                return told
            whole, self._held = self._held[: end - start + len(CLOSE)], self._held[end - start + len(CLOSE) :]
            if self._call(whole.removeprefix(OPEN).removesuffix(CLOSE)):
                self._held = self._held.lstrip()
                self._is_after_call = not self._held
            else:
                told += whole
        keep = _overlap(self._held, OPEN)
        told, self._held = told + self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return told

    def _all_json(self, text: str) -> bool:
        """Whether all of `text` is calls of functions that there are."""
        text = text.strip()
        for prefix in PREFIXES:
            text = text.removeprefix(prefix)
        found = _decoded(text)
        if found is None:
            found = [_decoded(line) for line in text.replace(";", "\n").splitlines() if line.strip()]
        calls = found if isinstance(found, list) else [found]
        if not calls or not all(isinstance(call, dict) and call.get("name") in self.names for call in calls):
            return False
        return min([self._note(call) for call in calls])  # all are noted

    def _call(self, text: str) -> bool:
        found = _decoded(text)
        return isinstance(found, dict) and self._note(found)

    def _note(self, call: dict[str, Any]) -> bool:
        name = call.get("name")
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(name, str) or not name or self.num_calls >= MAX_CALLS:
            return False
        written = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        tool = CalledTool(
            id=f"call_{secrets.token_hex(12)}", function=CalledFunction(name, written), index=self.num_calls
        )
        self._calls.append(tool)
        self.num_calls += 1
        return True

    def _take(self) -> list[CalledTool]:
        calls, self._calls = self._calls, []
        return calls


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that `string` begins with."""
    return max((n for n in range(1, min(len(text), len(string)) + 1) if string.startswith(text[-n:])), default=0)
