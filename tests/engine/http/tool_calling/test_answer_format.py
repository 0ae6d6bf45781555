"""Tool options of a chat request, valid and invalid."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvscope_engine.http.schemas.api_errors import ApiError
from kvscope_engine.http.schemas.request_bodies import ChatBody
from kvscope_engine.http.schemas.sampling_mapping import chat_sampling
from kvscope_engine.http.tool_calling.answer_format import answer_format, check_tool_choice

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
FORMATS_BY_NAME = {"type": "function", "function": {"name": "time"}}


def chat(**fields: Any) -> ChatBody:
    return msgspec.convert({"messages": [{"role": "user", "content": "Hi"}], **fields}, ChatBody)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "auto"},
        {"tool_choice": FORMATS_BY_NAME},
        {"tools": TOOLS, "tool_choice": "any"},
        {"tools": TOOLS, "tool_choice": {"type": "function"}},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sing"}}},
    ],
)
def test_invalid_tool_choice_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="tool_choice=") as error:
        check_tool_choice(chat(**fields))
    assert (error.value.status, error.value.param) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("fields", "forced", "is_one"),
    [
        ({}, [], False),
        ({"parallel_tool_calls": False}, [], True),
        ({"tool_choice": "required"}, ["weather", "time"], False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["weather", "time"], True),
        ({"tool_choice": FORMATS_BY_NAME}, ["time"], True),
    ],
)
def test_tool_choice_determines_the_forced_functions(fields: dict[str, Any], forced: list[str], is_one: bool) -> None:
    body = chat(tools=TOOLS, **fields)
    check_tool_choice(body)
    use = answer_format(body, None, "hermes")
    assert (use.max_calls == 1) is is_one
    structured = use.sampling(chat_sampling(body)).structured
    if structured is None:
        assert not forced
        return
    tag = json.loads(structured.text)["format"]
    assert tag["stop_after_first"] is is_one
    assert [name for name in ("weather", "time") if any(name in one["begin"] for one in tag["tags"])] == forced


def test_tool_choice_none_means_that_no_tool_calls_are_parsed() -> None:
    use = answer_format(chat(tools=TOOLS, tool_choice="none"), None, "hermes")
    assert use.reader(None, ()) is None


def test_forced_call_excludes_another_response_format() -> None:
    body = chat(tools=TOOLS, tool_choice="required", response_format={"type": "json_object"})
    with pytest.raises(ApiError, match="tool_choice"):
        answer_format(body, None, "").sampling(chat_sampling(body))
