"""Server-sent events split at any byte, and the replies decoded from them."""

from __future__ import annotations

import pytest
from tests.telemetry.collectors.prompting.conftest import chat_chunk, event

from kvscope_telemetry.collectors.prompting.error_text import MAX_CHARACTERS, error_text_of_body
from kvscope_telemetry.collectors.prompting.streamed_answer import (
    MAX_EVENT_BYTES,
    AnswerError,
    EventLines,
    StreamedAnswer,
)
from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.commands import ToolCall, Usage

STREAM = b": ping\r\n\r\ndata: one\r\n\r\nevent: x\nid: 5\ndata:two\ndata: and more\n\n\ndata: \xc3\xa9\n\n"


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_events_split_at_any_byte_are_reassembled(size: int) -> None:
    lines, events = EventLines(), []
    for start in range(0, len(STREAM), size):
        events += lines.feed(STREAM[start : start + size])
    assert events == [b"one", b"two\nand more", b"\xc3\xa9"]


@pytest.mark.parametrize("piece", [b"x" * 70_000, b"data: " + b"x" * 70_000 + b"\n"])
def test_endless_event_is_refused(piece: bytes) -> None:
    lines = EventLines()
    for _ in range(MAX_EVENT_BYTES // len(piece)):
        lines.feed(piece)
    with pytest.raises(ProtocolError, match="more than 1 MB"):
        lines.feed(piece)


def data(**body: object) -> bytes:
    return event(**body).removeprefix(b"data: ").strip()


def test_answer_has_text_token_ids_and_usage() -> None:
    telling = StreamedAnswer("a", 1)
    assert telling.feed(data(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])) == []
    (tokens,) = telling.feed(data(**chat_chunk("Hi", token_ids=[5, 6])))
    assert (tokens.text, tokens.token_ids, tokens.request_id) == ("Hi", (5, 6), "a")
    (tokens,) = telling.feed(data(choices=[{"index": 0, "text": "!", "finish_reason": "length"}]))
    assert (tokens.text, telling.is_whole) == ("!", True)
    details = {"cached_tokens": 16}
    usage = {"prompt_tokens": 20, "completion_tokens": 4, "total_tokens": 24, "prompt_tokens_details": details}
    assert telling.feed(data(choices=[], usage=usage)) == []
    (end,) = telling.ends()
    assert (end.finish_reason, end.usage) == ("length", Usage(prompt_tokens=20, cached_tokens=16, completion_tokens=4))
    assert end.timing.ttft_s is not None
    assert end.timing.total_s >= end.timing.ttft_s


def test_tokens_of_several_completions_are_counted_separately() -> None:
    telling = StreamedAnswer("a", 2)
    for index, text in ((0, "a"), (1, "b"), (1, "c")):
        telling.feed(data(**chat_chunk(text, index)))
    telling.feed(data(choices=[{"index": 1, "finish_reason": "stop"}], usage={"completion_tokens": 9}))
    assert not telling.is_whole
    ends = telling.ends("abort")
    assert [(end.index, end.finish_reason, end.usage.completion_tokens) for end in ends] == [
        (0, "abort", 1),
        (1, "stop", 2),
    ]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_wrapped_in_think_tags(name: str) -> None:
    telling = StreamedAnswer("a", 1)
    pieces = [{name: "hm"}, {name: ", so"}, {"content": "Yes"}, {"content": "."}]
    texts = [t.text for piece in pieces for t in telling.feed(data(choices=[{"index": 0, "delta": piece}]))]
    assert "".join(texts) == "<think>\nhm, so\n</think>\n\nYes."


@pytest.mark.parametrize(
    "event",
    [
        b"",
        b"no json",
        b"[]",
        b"[" * 5000,
        b"\xff",
        b'{"choices": 5}',
        b'{"choices": [{"index": "x"}]}',
        b'{"choices": [{"index": 1}]}',
        b'{"choices": [{"index": -1}]}',
        b'{"choices": [{"token_ids": [-1]}]}',
        b'{"choices": [{"delta": {"content": 5}}]}',
        b'{"usage": {"completion_tokens": -1}}',
    ],
)
def test_malformed_answer_is_refused(event: bytes) -> None:
    with pytest.raises(ProtocolError, match="its answer"):
        StreamedAnswer("a", 1).feed(event)


def test_error_inside_a_stream_is_raised() -> None:
    for body in ({"error": {"message": "out of\nmemory"}}, {"object": "error", "message": "out of memory"}):
        with pytest.raises(AnswerError, match=r"^out of memory$"):
            StreamedAnswer("a", 1).feed(data(**body))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "no such model", "code": 404}}', "no such model"),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b'{"detail": [{"loc": ["body"], "msg": "field required"}]}', "field required"),
        (b"plain\r\ntext \x1b[31m", "plain text ?[31m"),
        (b"<html>busy</html>", ""),
        (b"", ""),
        (b"5", ""),
        (b'{"error": {"error": {"error": {"error": {"error": "deep"}}}}}', ""),
        (b"x" * 5000, "x" * MAX_CHARACTERS + "…"),
    ],
)
def test_error_message_is_extracted_from_any_form_of_error_response(body: bytes, words: str) -> None:
    assert error_text_of_body(body) == words


def test_chunk_of_another_server_with_null_choices_and_float_counts_is_read() -> None:
    answer = StreamedAnswer("r", 1)
    assert answer.feed(b'{"choices": null}') == []
    events = b'{"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": 1.0, "prompt_tokens": "2"}}'
    assert [tokens.text for tokens in answer.feed(events)] == ["a"]
    (end,) = answer.ends("stop")
    assert (end.usage.completion_tokens, end.usage.prompt_tokens) == (1, 2)


def test_pieces_of_tool_calls_are_joined() -> None:
    answer = StreamedAnswer("a", 1)
    for part in (
        {"index": 0, "id": "c1", "function": {"name": "time", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"zone":'}},
        {"index": 0, "function": {"arguments": ' "CET"}'}},
        {"index": 1, "id": "c2", "function": {"name": "date"}},
    ):
        answer.feed(data(choices=[{"index": 0, "delta": {"tool_calls": [part]}}]))
    answer.feed(data(choices=[{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]))
    (last,) = answer.ends()
    assert last.finish_reason == "stop"
    assert last.tool_calls == (
        ToolCall(id="c1", name="time", arguments='{"zone": "CET"}'),
        ToolCall(id="c2", name="date", arguments="{}"),
    )


def test_endless_tool_calls_are_refused() -> None:
    answer = StreamedAnswer("a", 1)
    parts = [{"index": index, "function": {"name": "time"}} for index in range(129)]
    with pytest.raises(ProtocolError, match="more than 128 tool calls"):
        answer.feed(data(choices=[{"index": 0, "delta": {"tool_calls": parts}}]))
