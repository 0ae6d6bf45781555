"""The Responses API and reasoning, with OpenAI's client and the default model on the real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.engine.http.served import Served

from kvscope_engine import Engine, EngineConfig
from kvscope_engine.http.schemas.api_errors import ApiError
from kvscope_engine.http.schemas.request_bodies import ContentPart
from kvscope_engine.http.schemas.responses_api import InputItem, ResponsesBody, ResponsesTool, chat_body

ASKED: Any = {"model": "default", "temperature": 0, "max_output_tokens": 12}
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"]},
    "strict": True,
}
ITEM_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    def build(progress: Any, publish: Any, messages_dropped: Any) -> Engine:
        config = EngineConfig(device="cpu", num_gpu_blocks_override=64, max_model_len=512)
        return Engine(config, progress=progress, publish=publish, messages_dropped=messages_dropped)

    one = Served(build=build)
    yield one
    one.close()


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    host, port = served.address
    with openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def reasoning_template(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the chat template begin the reasoning, so that an answer that never ends it consists of reasoning."""
    assert served.ask("/tokenize", {"prompt": "load the tokenizer"})[0] == 200
    tokenizer = served.api.tokenizer_threads._loading.result()
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template + "<think>\n")


def test_text_input_has_the_answer_of_a_chat(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASKED, input="What is the capital of France?", instructions="Be brief.")
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    chat = client.chat.completions.create(model="default", messages=messages, temperature=0, max_completion_tokens=12)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.store) == (
        "completed" if chat.choices[0].finish_reason == "stop" else "incomplete",
        False,
    )
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens


def test_stream_has_the_documented_events_in_order(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED, input="What is the capital of France?")
    events = list(client.responses.create(**ASKED, input="What is the capital of France?", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"
    assert list(dict.fromkeys(kinds[2:-1])) == ITEM_EVENTS
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage.model_copy(
        update={"input_tokens_details": last.response.usage.input_tokens_details}
    )


def test_answer_cut_by_max_output_tokens_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASKED | {"max_output_tokens": 2}, input="Count to one hundred.")
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"


def test_forced_function_call_is_an_item_and_its_output_is_accepted(client: openai.OpenAI) -> None:
    asked = ASKED | {"tools": [TOOL], "max_output_tokens": 100}
    response = client.responses.create(
        **asked, input="Will it rain?", tool_choice="required", parallel_tool_calls=False
    )
    (call,) = response.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["days"] in (1, 2)
    items: Any = [
        {"role": "user", "content": "Will it rain?"},
        *(item.model_dump() for item in response.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "no"},
    ]
    second = client.responses.create(**ASKED, input=items)
    assert second.output_text


def test_streamed_function_call_has_its_arguments(client: openai.OpenAI) -> None:
    asked = ASKED | {"tools": [TOOL], "max_output_tokens": 100, "tool_choice": {"type": "function", "name": "weather"}}
    events = list(client.responses.create(**asked, input="Will it rain?", stream=True))
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.name for event in done] == ["weather"]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.type for item in added] == ["function_call"]
    assert json.loads(done[0].arguments)["days"] in (1, 2)


def test_text_format_forces_json(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    asked: Any = ASKED | {
        "max_output_tokens": 60,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
    }
    assert json.loads(client.responses.create(**asked, input="One?").output_text)["a"] in (1, 2)


def test_logprobs_are_included_when_asked_for(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASKED, input="Hello", top_logprobs=2, include=["message.output_text.logprobs"])
    message = response.output[0]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"store": True}, "store"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "custom", "name": "apply_patch"}]}, "tools"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "messages"),
    ],
)
def test_state_and_builtin_tools_are_refused_by_name(served: Served, fields: dict[str, Any], param: str) -> None:
    status, answer = served.ask("/v1/responses", {"input": "Hi", "max_output_tokens": 1} | fields)
    assert (status, answer["error"]["param"]) == (400, param)


def test_items_of_a_turn_become_one_message_of_the_assistant() -> None:
    body = ResponsesBody(
        instructions="Be brief.",
        input=[
            InputItem(role="user", content=[ContentPart(type="input_text", text="Rain?")]),
            InputItem(type="reasoning", summary=[], content=[ContentPart(type="reasoning_text", text="Look it up.")]),
            InputItem(role="assistant", content=[ContentPart(type="output_text", text="I look.")]),
            InputItem(type="function_call", call_id="c", name="weather", arguments="{}"),
            InputItem(type="function_call_output", call_id="c", output="no"),
            InputItem(role="developer", content="Answer now."),
        ],
    )
    messages = chat_body(body).messages
    assert [message.role for message in messages] == ["system", "user", "assistant", "tool", "developer"]
    turn = messages[2]
    assert (turn.reasoning, turn.content) == ("Look it up.", "I look.")
    assert [call.function.name for call in turn.tool_calls or []] == ["weather"]
    assert (messages[3].tool_call_id, messages[3].content) == ("c", "no")


def test_function_without_a_name_is_refused() -> None:
    with pytest.raises(ApiError, match="only functions with a name are"):
        chat_body(ResponsesBody(input="Hi", tools=[ResponsesTool(type="function")]))


@pytest.mark.usefixtures("reasoning_template")
def test_reasoning_has_its_own_field_in_a_chat(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "default",
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0,
        "max_completion_tokens": 8,
    }
    message: Any = client.chat.completions.create(**asked).choices[0].message
    assert message.content is None
    assert message.reasoning
    assert message.reasoning_content == message.reasoning
    deltas: list[Any] = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == message.reasoning
    assert not "".join(delta.content or "" for delta in deltas)
    hidden: Any = client.chat.completions.create(**asked, extra_body={"include_reasoning": False}).choices[0].message
    assert not hasattr(hidden, "reasoning")


@pytest.mark.usefixtures("reasoning_template")
def test_reasoning_is_an_item_of_a_response(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASKED, input="Hi")
    (item,) = response.output
    assert item.type == "reasoning"
    assert item.content
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == response.usage.output_tokens
    kinds = [event.type for event in client.responses.create(**ASKED, input="Hi", stream=True)]
    assert "response.reasoning_text.delta" in kinds
    items: Any = [{"role": "user", "content": "Hi"}, item.model_dump(), {"role": "user", "content": "And?"}]
    assert client.responses.create(**ASKED, input=items).status in ("completed", "incomplete")
