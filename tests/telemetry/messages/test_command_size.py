"""Size of a command, and the answer to one that cannot be decoded."""

from __future__ import annotations

import msgspec
import pytest

from kvscope_telemetry.messages.command_size import command_bytes
from kvscope_telemetry.messages.commands import (
    Abort,
    ChatMessage,
    Command,
    Control,
    EstimatePrompt,
    Failed,
    GetBlockText,
    GetSnapshot,
    Refused,
    Submit,
    ToolCall,
)
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.structured import Structured
from kvscope_telemetry.messages.wire import answer_unreadable, encode

CALLS = ChatMessage(
    role="assistant", content="", tool_calls=(ToolCall(id="i" * 256, name="n", arguments="{}"),) * 128, name="m" * 256
)
EMPTY = ChatMessage(role="user", content="")


@pytest.mark.parametrize(
    "command",
    [
        Submit(request_id="r" * 128, prompt="p" * 10_000),
        Submit(request_id="r", prompt="\U0001f600" * 10_000),
        Submit(request_id="r", messages=(EMPTY,) * 4_000),
        Submit(request_id="r", prompt_token_ids=(1,) * 10_000),
        Submit(request_id="r", prompt="p", sampling=SamplingParams(stop=("s" * 256,) * 16)),
        Submit(request_id="r", prompt="p", sampling=SamplingParams(stop_token_ids=(1 << 30,) * 256)),
        Submit(
            request_id="r",
            prompt="p",
            sampling=SamplingParams(logit_bias=dict.fromkeys(range(1 << 20, (1 << 20) + 1024), 0.1)),
        ),
        Submit(
            request_id="r", prompt="p", sampling=SamplingParams(structured=Structured(kind="regex", text="x" * 10_000))
        ),
        Submit(request_id="r", prompt="p", tools="x" * 10_000, cache_salt="y" * 1_000),
        Submit(request_id="r", messages=(CALLS,) * 100),
        EstimatePrompt(messages=(CALLS,) * 100, tools="x" * 10_000, cache_salt="y" * 1_000),
        GetBlockText(blocks=(1,) * 4_096),
        Abort(request_id="r"),
        GetSnapshot(),
        Control(action="pause"),
    ],
)
def test_command_size_is_at_least_its_encoded_size(command: Command) -> None:
    assert command_bytes(command) >= len(encode(command))


def raw(**fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


def test_unreadable_submission_is_refused_by_its_request_id() -> None:
    data = raw(type="Submit", request_id="mine", prompt=5, sampling={"n": -1}, novel=[{"x": 1}])
    assert answer_unreadable(data, "why") == Refused(request_id="mine", reason="why")


def test_unreadable_command_fails_with_its_tag() -> None:
    assert answer_unreadable(raw(type="GetBlockText", blocks="x", tag=9), "why") == Failed(reason="why", tag=9)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        raw(type="Submit", request_id=7),
        raw(type="Submit", request_id="x" * 200),
        raw(type="Submit"),
        raw(type=1, tag=2),
        b"\x82\xa4type\xa9GetStatus\xa3tag\xff\xff",
    ],
)
def test_unreadable_command_without_a_tag_fails_without_one(data: bytes) -> None:
    assert answer_unreadable(data, "why") == Failed(reason="why")
