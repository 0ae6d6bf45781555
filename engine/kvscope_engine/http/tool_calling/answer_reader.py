"""Reads one answer while it streams: separates reasoning, content and tool calls.

Reasoning is separated only at the beginning of an answer. A reasoning mark in the middle of an answer is ordinary text,
for example in an answer about such marks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from kvscope_engine.http.schemas.responses import CalledTool
from kvscope_engine.http.tool_calling.streamed_text import partial_mark_length
from kvscope_engine.http.tool_calling.tool_call_reader import ToolCallReader


class AnswerPart(NamedTuple):
    """Result of reading one piece of an answer: new text of the reasoning, new text of the content, and newly
    completed calls.
    """

    reasoning: str
    content: str
    calls: list[CalledTool]


class AnswerReader(Protocol):
    @property
    def is_reasoning(self) -> bool:
        """Whether the text read last belongs to the reasoning."""

    @property
    def num_calls(self) -> int: ...

    def read(self, text: str, *, is_last: bool) -> AnswerPart:
        """Read the next piece of the answer.

        `is_last`: whether the answer ends with this piece. If so, text that was held back because it may begin a mark,
        such as `<tool_call>`, is returned as well.
        """


class ReasoningSplitter:
    """Separates the reasoning with which an answer begins.

    White space at the beginning of the reasoning, and between it and the content, is dropped.

    Args:
        marks: Closing mark by opening mark of reasoning, such as `</think>` by `<think>`.
        end: Closing mark of reasoning that the prompt has already opened; "" if the prompt opened none.
    """

    def __init__(self, marks: Mapping[str, str], end: str = "") -> None:
        self._marks = marks
        self._end = end
        self._text = ""
        self._is_content = False
        self._drops_space = True

    @property
    def is_reasoning(self) -> bool:
        return bool(self._end)

    def split(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """Return the reasoning and the content in the next piece of the answer."""
        self._text += text
        reasoning = ""
        if not self._is_content and not self._end:
            self._find_begin(is_last)
        if self._end:
            reasoning = self._read_reasoning(is_last)
        return reasoning, self._pop(len(self._text)) if self._is_content else ""

    def _find_begin(self, is_last: bool) -> None:
        start = self._text.lstrip()
        for begin, end in self._marks.items():
            if start.startswith(begin):
                self._text, self._end = start[len(begin) :], end
                return
        if is_last or not any(begin.startswith(start) for begin in self._marks):
            self._is_content, self._drops_space = True, False

    def _read_reasoning(self, is_last: bool) -> str:
        index = self._text.find(self._end)
        if index < 0:
            held = 0 if is_last else partial_mark_length(self._text, (self._end,))
            return self._pop(len(self._text) - held)
        reasoning = self._pop(index)
        self._text = self._text.removeprefix(self._end)
        self._end, self._is_content, self._drops_space = "", True, True
        return reasoning

    def _pop(self, length: int) -> str:
        popped, self._text = self._text[:length], self._text[length:]
        if self._drops_space:
            popped = popped.lstrip()
            self._drops_space = not popped
        return popped


class MarkedAnswerReader:
    """Reads answers in which marks such as `<think>` and `<tool_call>` enclose the reasoning and the calls. The
    reasoning comes first, and the calls are in the content.
    """

    def __init__(self, splitter: ReasoningSplitter | None, call_reader: ToolCallReader | None) -> None:
        self._splitter = splitter
        self._call_reader = call_reader

    @property
    def is_reasoning(self) -> bool:
        return self._splitter is not None and self._splitter.is_reasoning

    @property
    def num_calls(self) -> int:
        return 0 if self._call_reader is None else self._call_reader.num_calls

    def read(self, text: str, *, is_last: bool) -> AnswerPart:
        reasoning, content = ("", text) if self._splitter is None else self._splitter.split(text, is_last=is_last)
        if self._call_reader is None:
            return AnswerPart(reasoning, content, [])
        content, calls = self._call_reader.add(content)
        if is_last:
            last_content, last_calls = self._call_reader.flush()
            content, calls = content + last_content, calls + last_calls
        return AnswerPart(reasoning, content, calls)
