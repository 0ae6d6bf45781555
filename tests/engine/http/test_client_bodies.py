"""Request bodies as sent by real clients: fields of other servers, replayed history, and unusual values.

The issue of the client that sent such a body is named in each case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.engine.http.served import Served, read_all

from kvscope_engine import Engine, EngineConfig
from kvscope_engine.http import http_connection

CHAT = "/v1/chat/completions"
HELLO: Any = {"role": "user", "content": "Hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"p": "a'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "x"}
CACHED = {"type": "ephemeral"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

ACCEPTED: dict[str, dict[str, Any]] = {
    "cut arguments of an earlier call (codegraff 752)": {
        "messages": [HELLO, {"role": "assistant", "tool_calls": [CALL]}, RESULT, HELLO]
    },
    "arguments that are no object": {
        "messages": [
            HELLO,
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "read", "arguments": "[1]"}}]},
            RESULT,
        ]
    },
    "reasoning in history (oh-my-pi 1157)": {
        "messages": [HELLO, {"role": "assistant", "content": "Hi", "reasoning": "greet"}, HELLO]
    },
    "tool result that is null (docker-agent 63)": {
        "messages": [
            HELLO,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": None},
        ]
    },
    "cache_control in a content part (litellm 39355)": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": CACHED}]}]
    },
    "cache_control in a tool (litellm 39355)": {"tools": [TOOL | {"cache_control": CACHED}], "tool_choice": "none"},
    "field that no server has": {"my_own_field": {"a": [1]}},
    "no limit as -1": {"max_tokens": -1},
    "completion limit as -1": {"max_completion_tokens": -1},
    "integer as float": {"max_tokens": 2.0},
    "integer as text": {"max_tokens": "2"},
    "top_p 0": {"top_p": 0},
    "null fields of older clients": {"functions": None, "function_call": None, "audio": None},
    "llama.cpp's options at their defaults": {"cache_prompt": True, "id_slot": -1, "typical_p": 1.0, "mirostat": 0},
    "metadata of a gateway": {"user": "u", "metadata": {"a": "b"}, "litellm_call_id": "x", "provider": {"order": []}},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "functions": ({"functions": [{"name": "f"}]}, "functions"),
    "audio": ({"audio": {"voice": "a"}}, "audio"),
    "web search": ({"web_search_options": {}}, "web_search_options"),
    "mirostat": ({"mirostat": 2}, "mirostat"),
    "grammar of llama.cpp": ({"grammar": "root ::= [a-z]"}, "grammar"),
    "user message without content": ({"messages": [{"role": "user", "content": None}]}, "messages"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    "too many logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "max_tokens that is no number": ({"max_tokens": "many"}, "max_tokens"),
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """API of an engine with the default model, whose chat template reads roles and no tools."""

    def build(progress: Any, publish: Any, messages_dropped: Any) -> Engine:
        config = EngineConfig(device="cpu", num_gpu_blocks_override=64, max_model_len=256)
        return Engine(config, progress=progress, publish=publish, messages_dropped=messages_dropped)

    one = Served(build=build)
    yield one
    one.close()


def body_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [HELLO], "max_tokens": 2, "temperature": 0} | fields


@pytest.mark.parametrize("fields", ACCEPTED.values(), ids=list(ACCEPTED))
def test_chat_body_as_sent_by_real_clients_is_accepted(served: Served, fields: dict[str, Any]) -> None:
    status, answer = served.ask(CHAT, body_of(fields))
    assert status == 200, answer
    assert answer["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=list(REFUSED))
def test_field_that_would_change_the_answer_is_refused_by_name(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    status, answer = served.ask(CHAT, body_of(fields))
    assert (status, answer["error"]["param"]) == (400, param)


def test_unknown_field_is_reported_once(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        assert served.ask("/v1/completions", {"prompt": "x", "max_tokens": 1, "a_new_field": 1})[0] == 200
    assert capfd.readouterr().err.count("ignoring the unknown field 'a_new_field' of Completion") == 1


def test_path_may_end_with_a_slash_and_root_answers(served: Served) -> None:
    assert served.ask(CHAT + "/", body_of({}))[0] == 200
    assert served.ask("/")[1]["name"] == "kvscope"


@pytest.mark.parametrize(
    ("allowed", "origin", "granted"),
    [
        ((), "https://a.example", None),
        (("https://a.example",), "https://a.example", "https://a.example"),
        (("https://a.example",), "https://b.example", None),
        (("*",), "https://b.example", "*"),
    ],
    ids=["off", "listed", "other", "all"],
)
def test_web_pages_of_allowed_origins_may_use_the_api(
    serving: Callable[..., Served], allowed: tuple[str, ...], origin: str, granted: str | None
) -> None:
    """A preflight request carries no API key."""
    served = serving(allowed_origins=allowed, api_key="secret")
    head = [
        f"OPTIONS {CHAT} HTTP/1.1",
        "Host: localhost",
        f"Origin: {origin}",
        "Access-Control-Request-Method: POST",
        "Access-Control-Request-Headers: authorization",
        "Connection: close",
    ]
    answer = read_all(served.send("\n".join(head))).decode().lower()
    name = "access-control-allow-origin: "
    found = [line.removeprefix(name) for line in answer.split("\r\n") if line.startswith(name)]
    assert found == ([] if granted is None else [granted])


def test_event_stream_sends_comments_while_no_token_is_ready(
    serving: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection.EventStream, "comment_s", 0.05)
    served = serving(step_s=0.4)
    text = read_all(
        served.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "stream": True}, "Connection: close")
    ).decode()
    assert ": waiting" in text
    assert "data: [DONE]" in text.partition(": waiting")[2]
