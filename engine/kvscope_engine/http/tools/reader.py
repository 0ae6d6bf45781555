"""The calls in a model's answer, as it streams: text that is none goes on at once, calls are told whole at their end.

What looked like a call and is none stays in the text as it was written, and how the text was cut changes nothing.
"""

from __future__ import annotations

import secrets
import string
from typing import Final

from kvscope_engine.http.shapes.answers import CalledFunction, CalledTool
from kvscope_engine.http.tools.calls import Call, Tools
from kvscope_engine.http.tools.formats import ToolFormat

MAX_CALLS: Final = 128
SHORT_ID: Final = string.ascii_letters + string.digits


class ToolCallReader:
    """Of one answer, in a model's format; at most `max_calls` are told, and those beyond are dropped."""

    def __init__(self, tool_format: ToolFormat, tools: Tools, max_calls: int = MAX_CALLS) -> None:
        self.num_calls = 0
        self._format = tool_format
        self._tools = tools
        self._max_calls = max_calls
        self._held = ""
        self._is_whole: bool | None = None if tool_format.starts else False
        """Whether all of the answer may be calls; None before its first characters tell."""
        self._is_after_call = False
        """Whether nothing but white space came since the last call."""
        self._calls: list[CalledTool] = []
        self._ids: set[str] = set()

    def add(self, text: str) -> tuple[str, list[CalledTool]]:
        """Text that can be told, and calls that are whole."""
        self._held += text
        if self._is_whole is None:
            self._look_at_start()
        if self._is_whole is not False:
            return "", []
        return self._scan(), self._take()

    def flush(self) -> tuple[str, list[CalledTool]]:
        """The rest, at the end of the answer."""
        if self._is_whole and self._note(self._whole()):
            self._held = ""
            return "", self._take()
        self._is_whole = False
        text = self._scan()
        while self._held:  # a span without its end, or what might have become a mark
            text += self._end_of_held()
        return text, self._take()

    def _look_at_start(self) -> None:
        begin = self._held.lstrip()
        if begin and not any(start.startswith(begin) and start != begin for start in self._format.starts):
            self._is_whole = begin.startswith(self._format.starts)

    def _whole(self) -> list[Call] | None:
        """All of the answer as calls: of tools that there are, since nothing but its form says that it is any."""
        calls = self._format.read(self._held, self._tools)
        return calls if calls and all(call.name in self._tools for call in calls) else None

    def _scan(self) -> str:
        """Take whole spans out of what is held; the text around them."""
        text = ""
        while True:
            if self._is_after_call:
                self._held = self._held.lstrip()  # what parts one call from the next is no text
                self._is_after_call = not self._held
            place, mark = self._first_mark()
            if not mark:
                keep = max((_overlap(self._held, mark) for mark in self._marks), default=0)
                text, self._held = text + self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                return text
            text, self._held = text + self._held[:place], self._held[place:]
            if mark in self._format.silent:
                self._held, self._is_after_call = (
                    self._held.removeprefix(mark),
                    self._is_after_call or self.num_calls > 0,
                )
                continue
            end = self._held.find(self._format.end, len(mark)) if self._format.end else -1
            if end < 0:
                return text
            text += self._span(self._held[: end + len(self._format.end)], mark)

    def _span(self, span: str, mark: str) -> str:
        """Take it out of what is held; its mark as text where it is no call, so that the rest is looked at again."""
        if self._note(self._format.read(span, self._tools)):
            self._held, self._is_after_call = self._held[len(span) :], True
            return ""
        self._held = self._held[len(mark) :]
        return mark

    def _end_of_held(self) -> str:
        """At the answer's end: what is held as a span, else as text."""
        place, mark = self._first_mark()
        if place == 0 and mark:
            return self._span(self._held, mark) + self._scan()
        text, self._held = self._held, ""
        return text

    @property
    def _marks(self) -> tuple[str, ...]:
        return self._format.begins + self._format.silent

    def _first_mark(self) -> tuple[int, str]:
        found = [(place, mark) for mark in self._marks if (place := self._held.find(mark)) >= 0]
        return min(found, default=(-1, ""))

    def _note(self, calls: list[Call] | None) -> bool:
        for call in calls or ():
            if self.num_calls < self._max_calls:
                function = CalledFunction(call.name, call.arguments)
                self._calls.append(CalledTool(id=self._id(call), function=function, index=self.num_calls))
                self.num_calls += 1
        return bool(calls)

    def _id(self, call: Call) -> str:
        own = call.call_id
        if not own or own in self._ids:
            own = f"call_{secrets.token_hex(12)}"
            if self._format.has_short_ids:
                own = "".join(secrets.choice(SHORT_ID) for _ in range(9))
        self._ids.add(own)
        return own

    def _take(self) -> list[CalledTool]:
        calls, self._calls = self._calls, []
        return calls


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    return max((n for n in range(1, min(len(text), len(mark)) + 1) if mark.startswith(text[-n:])), default=0)
