"""Finds the tool calls in a model's answer while it streams.

Text outside calls is returned immediately, a call once it is complete. Text that only resembles a call remains text, as
do a call that is truncated by the end of the answer, and all reasoning. The result does not depend on how the answer is
divided into pieces.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection
from enum import Enum, auto
from typing import Final

from kvscope_engine.http.schemas.responses import CalledFunction, CalledTool
from kvscope_engine.http.tool_calling.call_parsers import ParseResult
from kvscope_engine.http.tool_calling.streamed_text import EndOfTextError, Search, StreamedText, partial_mark_length
from kvscope_engine.http.tool_calling.tool_call import ParsedCall, Tools
from kvscope_engine.http.tool_calling.tool_call_formats import REASONING, CallSpan, ToolFormat

MAX_CALLS: Final = 128
SHORT_ID_CHARACTERS: Final = string.ascii_letters + string.digits


class _State(Enum):
    START = auto()
    """At the beginning of an answer, or after its reasoning. The answer may consist only of calls."""
    WHOLE = auto()
    """In an answer that may consist only of calls. It is parsed once it is complete."""
    TEXT = auto()
    AFTER_CALL = auto()
    """In text, with only white space since the last call."""


class ToolCallReader:
    """Parses the tool calls of one streaming answer. At most `max_calls` calls are returned; later ones are dropped.

    Args:
        reasoning_end: Closing mark of reasoning that the prompt has already opened; "" if the prompt opened none.
        hidden: Marks of `REASONING` to leave out of the answer's text.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        tools: Tools,
        max_calls: int = MAX_CALLS,
        *,
        reasoning_end: str = "",
        hidden: Collection[str] = (),
    ) -> None:
        self.num_calls = 0
        self._format = tool_format
        self._tools = tools
        self._max_calls = max_calls
        self._reasoning_end = reasoning_end
        self._hidden = hidden
        self._text = StreamedText()
        self._span: Search[ParseResult] | None = None
        self._spans = {span.begin: span for span in tool_format.spans}
        self._marks = (*self._spans, *tool_format.silent, *REASONING)
        self._mark_pattern = re.compile("|".join(map(re.escape, self._marks)))
        self._state = self._first_state
        self._calls: list[CalledTool] = []
        self._ids: set[str] = set()

    def add(self, text: str) -> tuple[str, list[CalledTool]]:
        """Append a new piece of the answer. Returns its text outside of calls, and the calls that are now complete."""
        self._text.text += text
        content = []
        while (piece := self._advance()) is not None:
            content.append(piece)
        calls, self._calls = self._calls, []
        return "".join(content), calls

    def flush(self) -> tuple[str, list[CalledTool]]:
        """Return the remaining text and calls, at the end of the answer."""
        self._text.is_complete = True
        return self.add("")

    @property
    def _first_state(self) -> _State:
        return _State.START if self._format.whole else _State.TEXT

    def _advance(self) -> str | None:
        """Do one step. Returns the text that it adds to the content, or None if more of the answer is needed."""
        if self._span is not None:
            return self._continue_span(self._span)
        if self._reasoning_end:
            return self._continue_reasoning()
        if self._state is _State.START:
            return self._decide_start()
        if self._state is _State.WHOLE:
            return self._read_whole() if self._text.is_complete else None
        if self._state is _State.AFTER_CALL:
            return self._skip_after_call()
        return self._scan()

    def _continue_span(self, span: Search[ParseResult]) -> str | None:
        result = _resume(span, self._text)
        if result is None:
            return None
        self._span = None
        if not self._record(result.calls):
            return self._text.pop(result.end)
        self._text.pop(result.end)
        self._state = _State.AFTER_CALL
        return ""

    def _continue_reasoning(self) -> str | None:
        index = self._text.text.find(self._reasoning_end)
        if index < 0:
            return self._pop_before_mark((self._reasoning_end,))
        content = self._text.pop(index) + self._pop_reasoning_mark(self._reasoning_end)
        self._reasoning_end = ""
        self._state = self._first_state
        return content

    def _pop_reasoning_mark(self, mark: str) -> str:
        text = self._text.pop(len(mark))
        return "" if mark in self._hidden else text

    def _decide_start(self) -> str | None:
        begin = self._text.text.lstrip()
        starts = (*self._format.starts, *self._format.prefixes)
        if not self._text.is_complete and any(
            mark.startswith(begin) for mark in (*REASONING, *starts) if mark != begin
        ):
            return None
        is_whole = begin.startswith(starts) and not begin.startswith(tuple(REASONING))
        self._state = _State.WHOLE if is_whole else _State.TEXT
        return ""

    def _read_whole(self) -> str:
        """Parse a complete answer as calls. Only calls of functions in the request are accepted, because no
        marks show that the text is a call.
        """
        text, end = self._text.text, 0
        start = len(text) - len(text.lstrip())
        start += next((len(prefix) for prefix in self._format.prefixes if text.startswith(prefix, start)), 0)
        self._state = _State.TEXT
        for body in self._format.whole:
            result = _resume(body(self._text, start, self._tools), self._text)
            assert result is not None, "a complete text has a result"
            end = max(end, result.end)
            is_all = result.calls and not text[result.end :].strip()
            if is_all and all(call.name in self._tools for call in result.calls or ()):
                self._record(result.calls)
                self._text.pop(len(text))
                return ""
        return self._text.pop(end)

    def _skip_after_call(self) -> str | None:
        text = self._text.text
        self._text.pop(len(text) - len(text.lstrip()))
        text = self._text.text
        for closer in self._format.closers:
            if text.startswith(closer):
                self._text.pop(len(closer))
                return ""
        if not self._text.is_complete and (not text or any(mark.startswith(text) for mark in self._format.closers)):
            return None
        self._state = _State.TEXT
        return ""

    def _scan(self) -> str | None:
        """Return the text before the next mark. At a mark, enter the state that the mark begins."""
        match = self._mark_pattern.search(self._text.text)
        if match is None:
            return self._pop_before_mark(self._marks)
        if match.start():
            return self._text.pop(match.start())
        mark = match[0]
        if mark in self._spans:
            self._span = self._read_span(self._spans[mark])
            return ""
        if mark in self._format.silent:
            self._text.pop(len(mark))
            self._state = _State.AFTER_CALL  # white space after the mark is not part of the text either
            return ""
        self._reasoning_end = REASONING[mark]
        return self._pop_reasoning_mark(mark)

    def _pop_before_mark(self, marks: Collection[str]) -> str | None:
        """Return the text, except an ending that may become one of `marks`; None if nothing else is left."""
        text = self._text.text
        partial_length = 0 if self._text.is_complete else partial_mark_length(text, marks)
        return self._text.pop(len(text) - partial_length) or None

    def _read_span(self, span: CallSpan) -> Search[ParseResult]:
        calls, end = yield from span.body(self._text, len(span.begin), self._tools)
        if calls and span.end:
            mark, end = yield from self._text.expect((span.end,), end)
            calls = calls if mark else None
        return ParseResult(calls, end)

    def _record(self, calls: list[ParsedCall] | None) -> bool:
        for call in calls or ():
            if self.num_calls < self._max_calls:
                function = CalledFunction(call.name, call.arguments)
                self._calls.append(CalledTool(id=self._id(call), function=function, index=self.num_calls))
                self.num_calls += 1
        return bool(calls)

    def _id(self, call: ParsedCall) -> str:
        call_id = call.call_id
        if not call_id or call_id in self._ids:
            call_id = f"call_{secrets.token_hex(12)}"
            if self._format.has_short_ids:
                call_id = "".join(secrets.choice(SHORT_ID_CHARACTERS) for _ in range(9))
        self._ids.add(call_id)
        return call_id


def _resume(search: Search[ParseResult], text: StreamedText) -> ParseResult | None:
    """Continue a search. Returns None if the search needs more text. If the answer ends within a call, the text
    of this call counts as content.
    """
    try:
        next(search)
    except StopIteration as stop:
        result: ParseResult = stop.value
        return result
    except EndOfTextError:
        return ParseResult(None, len(text.text))
    return None
