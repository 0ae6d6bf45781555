"""Reads answers in the harmony format of gpt-oss: messages in channels, each with a header.

`analysis` is reasoning, `final` is content, and a message to `functions.NAME` is a call of that function. Source:
OpenAI harmony response format (https://cookbook.openai.com/articles/openai-harmony).
"""

from __future__ import annotations

import re
import secrets
from typing import Final

from kvscope_engine.http.schemas.responses import CalledFunction, CalledTool
from kvscope_engine.http.tool_calling.answer_reader import AnswerPart
from kvscope_engine.http.tool_calling.streamed_text import partial_mark_length
from kvscope_engine.http.tool_calling.tool_call import arguments_text

HEADER_END: Final = "<|message|>"
HEADER_MARKS: Final = ("<|start|>", "<|channel|>", "<|constrain|>")
MESSAGE_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
MAX_HEADER_CHARACTERS: Final = 512
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_HEADER_STARTS: Final = (*HEADER_MARKS, HEADER_END, "to=")


class HarmonyReader:
    """Reads one answer. At most `max_calls` calls are returned; later ones are dropped."""

    def __init__(self, max_calls: int) -> None:
        self.num_calls = 0
        self._max_calls = max_calls
        self._text = ""
        self._is_header = True
        self._channel = ""
        self._function = ""

    @property
    def is_reasoning(self) -> bool:
        return not self._is_header and self._channel == "analysis"

    def read(self, text: str, *, is_last: bool) -> AnswerPart:
        """Read the next piece. `is_last`: the answer ends with it."""
        self._text += text
        reasoning, content, calls = "", "", list[CalledTool]()
        while self._text:
            if self._is_header:
                if not self._read_header(is_last):
                    break
                continue
            body, is_complete = self._read_body(is_last)
            if self._function:
                if not is_complete:
                    break
                call = self._call(body)
                calls += call
                content += "" if call else body
            elif self._channel == "analysis":
                reasoning += body
            else:
                content += body
            if not is_complete:
                break
        return AnswerPart(reasoning, content, calls)

    def _read_header(self, is_last: bool) -> bool:
        """Read the header of the next message. Returns False if more text is needed.

        Text without a header is content. It occurs if the answer continues an earlier one, or if the model was
        fine-tuned without channels.
        """
        begin = self._text.lstrip()
        end = self._text.find(HEADER_END)
        may_be_header = any(begin.startswith(start) or start.startswith(begin) for start in _HEADER_STARTS)
        if may_be_header and end < 0:
            if not is_last and len(self._text) <= MAX_HEADER_CHARACTERS:
                return False
            if any(mark in self._text for mark in HEADER_MARKS):  # the answer ends within the header
                self._text = ""
                return False
            may_be_header = False
        if not may_be_header:
            self._is_header, self._channel, self._function = False, "", ""
            return True
        header = self._text[:end]
        self._text = self._text[end + len(HEADER_END) :]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel[1] if channel else ""
        self._function = recipient[1] if recipient else ""
        self._is_header = False
        return True

    def _read_body(self, is_last: bool) -> tuple[str, bool]:
        """Return the text of the message up to its end, and whether the end was found. A call is held back until
        then.
        """
        found = [(index, mark) for mark in MESSAGE_ENDS if (index := self._text.find(mark)) >= 0]
        if not found:
            if self._function and not is_last:
                return "", False
            held = 0 if is_last else partial_mark_length(self._text, MESSAGE_ENDS)
            body, self._text = self._text[: len(self._text) - held], self._text[len(self._text) - held :]
            return body, is_last
        index, mark = min(found)
        body = self._text[:index]
        is_next_header = mark in HEADER_MARKS
        self._text = self._text[index if is_next_header else index + len(mark) :]
        self._is_header = True
        return body, True

    def _call(self, body: str) -> list[CalledTool]:
        arguments = arguments_text(body)
        if arguments is None or self.num_calls >= self._max_calls:
            return []
        function = CalledFunction(self._function, arguments)
        self.num_calls += 1
        return [CalledTool(id=f"call_{secrets.token_hex(12)}", function=function, index=self.num_calls - 1)]
