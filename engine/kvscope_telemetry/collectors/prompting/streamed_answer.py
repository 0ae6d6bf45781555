"""Parses the event stream of one answer to `Tokens` and `Finished` replies.

Owns the state of each completion. Memory is bounded. Uses no sockets. Times are measured here and include the network.
The number of tokens is the one in the server's usage report. Without a report, it is the number of token ids or,
without ids, of pieces of the answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec

from kvscope_telemetry.collectors.prompting.error_text import error_text_of_document, one_line
from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.commands import MAX_TOOL_CALLS, Finished, RequestTiming, Tokens, ToolCall, Usage

MAX_EVENT_BYTES: Final = 1 << 20
DONE: Final = b"[DONE]"
_FIELD: Final = b"data:"
THINK: Final = ("<think>\n", "\n</think>\n\n")
"""Start and end markers that are added to reasoning that a server reports separately, as models write them in
their answers.
"""
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class _CalledFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct):
    """Part of a tool call: the first part has its id and name, each has a piece of its arguments."""

    index: int = 0
    id: str | None = None
    function: _CalledFunction | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_CallDelta] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[_TokenId] | None = None


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str = ""
    message: Any = None


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Completion:
    reason: str = ""
    num_tokens: int = 0
    first_s: float | None = None
    is_thinking: bool = False
    calls: dict[int, _Call] = field(default_factory=dict)


class EventLines:
    """Splits the bytes of one answer, received in arbitrary pieces, into server-sent events."""

    def __init__(self) -> None:
        self._remainder = b""
        self._data: list[bytes] = []
        self._num_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each event that `data` completes. Raises ProtocolError for an event that is too large."""
        *lines, self._remainder = (self._remainder + data).split(b"\n")
        events: list[bytes] = []
        for line in lines:
            self._end_line(line.removesuffix(b"\r"), events)
        if len(self._remainder) + self._num_bytes > MAX_EVENT_BYTES:
            raise ProtocolError(f"one event of the answer has more than {MAX_EVENT_BYTES >> 20} MB: that is not read")
        return events

    def _end_line(self, line: bytes, events: list[bytes]) -> None:
        if line.startswith(_FIELD):
            self._data.append(line[len(_FIELD) :].removeprefix(b" "))
            self._num_bytes += len(line)
        elif not line and self._data:
            events.append(b"\n".join(self._data))
            self._data.clear()
            self._num_bytes = 0


class AnswerError(ProtocolError):
    """Raised if the server reports an error within its answer."""


class StreamedAnswer:
    """State of an answer with `num_completions` completions. Its times are measured from construction."""

    def __init__(self, request_id: str, num_completions: int) -> None:
        self._request_id = request_id
        self._completions = [_Completion() for _ in range(num_completions)]
        self._usage = _Usage()
        self._started_s = time.monotonic()
        self._decoder = msgspec.json.Decoder(_Chunk, strict=False)

    @property
    def is_whole(self) -> bool:
        return all(completion.reason for completion in self._completions)

    def feed(self, event: bytes) -> list[Tokens]:
        """Parse an event and return its tokens.

        Raises ProtocolError if the event is malformed, AnswerError if the server reports an error in it.
        """
        try:
            chunk = self._decoder.decode(event)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ProtocolError(f"its answer cannot be read ({error})") from None
        if chunk.error is not None or chunk.object == "error":
            message = error_text_of_document(chunk.error) or error_text_of_document(chunk.message)
            raise AnswerError(message or "an error, without saying which")
        if chunk.usage is not None:
            self._usage = chunk.usage
        return [tokens for choice in chunk.choices or () for tokens in self._apply_choice(choice)]

    def ends(self, reason: str = "") -> list[Finished]:
        """Return a `Finished` reply for each completion, with `reason` for those that did not finish."""
        total_s = time.monotonic() - self._started_s
        return [self._end(index, one.reason or reason, total_s) for index, one in enumerate(self._completions)]

    def _apply_choice(self, choice: _Choice) -> Iterator[Tokens]:
        if not 0 <= choice.index < len(self._completions):
            raise ProtocolError(f"its answer has a completion {choice.index}: {len(self._completions)} were asked for")
        completion = self._completions[choice.index]
        text, ids = _text(choice, completion), tuple(choice.token_ids or ())
        calls = choice.delta.tool_calls or () if choice.delta is not None else ()
        for call in calls:
            _add_call(completion, call)
        if choice.finish_reason:
            # A call ends an answer as the end of its text does.
            reason = "stop" if choice.finish_reason == "tool_calls" else choice.finish_reason
            completion.reason = one_line(reason)
        if not text and not ids and not calls:
            return
        if completion.first_s is None:
            completion.first_s = time.monotonic() - self._started_s
        completion.num_tokens += len(ids) or 1
        yield Tokens(request_id=self._request_id, token_ids=ids, text=text, index=choice.index)

    def _end(self, index: int, reason: str, total_s: float) -> Finished:
        completion, usage = self._completions[index], self._usage
        is_only = len(self._completions) == 1  # the usage covers all completions together
        num_tokens = usage.completion_tokens if is_only else None
        details = usage.prompt_tokens_details or _Details()
        return Finished(
            request_id=self._request_id,
            index=index,
            finish_reason=reason,
            usage=Usage(
                prompt_tokens=usage.prompt_tokens or 0,
                cached_tokens=details.cached_tokens or 0,
                completion_tokens=completion.num_tokens if num_tokens is None else num_tokens,
            ),
            timing=RequestTiming(ttft_s=completion.first_s, total_s=total_s),
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.name, arguments="".join(call.arguments) or "{}")
                for call in completion.calls.values()
                if call.name
            ),
        )


def _add_call(completion: _Completion, part: _CallDelta) -> None:
    """Add a part of a call to the calls of `completion`. Raises ProtocolError for too many calls."""
    if part.index not in completion.calls and len(completion.calls) >= MAX_TOOL_CALLS:
        raise ProtocolError(f"its answer has more than {MAX_TOOL_CALLS} tool calls")
    call = completion.calls.setdefault(part.index, _Call())
    call.id = call.id or part.id or ""
    if part.function is not None:
        call.name = call.name or part.function.name or ""
        call.arguments.append(part.function.arguments or "")


def _text(choice: _Choice, completion: _Completion) -> str:
    delta = choice.delta or _Delta()
    text = (choice.text or "") + (delta.content or "")
    thought = delta.reasoning_content or delta.reasoning or ""
    if thought and not completion.is_thinking:
        completion.is_thinking, thought = True, THINK[0] + thought
    if completion.is_thinking and (text or choice.finish_reason):
        completion.is_thinking, thought = False, thought + THINK[1]
    return thought + text
