"""Turns with tools and calls are given to templates as in transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvscope_engine.tokenization.tokenizer import Tokenizer, to_template_message
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import ChatMessage, ToolCall

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call {{ call.id }}>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}"
    "{% if m.name is defined %}<by {{ m.name }}>{% endif %}"
    "{% if m.tool_call_id is defined %}<answers {{ m.tool_call_id }}>{% endif %}{% endfor %}"
)


class EmptyCodec:
    """A codec without tokens."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return []


def rendered_text(*messages: ChatMessage, tools: list[dict[str, Any]] | None = None) -> str:
    codec: Any = EmptyCodec()
    return Tokenizer(codec, {}, TEMPLATE).chat_text(messages, tools=tools)


def test_tool_call_and_its_result_are_rendered() -> None:
    call = ToolCall(id="c1", name="weather", arguments='{"city": "Köln"}')
    text = rendered_text(
        ChatMessage(role="user", content="And?"),
        ChatMessage(role="assistant", content="", tool_calls=(call,)),
        ChatMessage(role="tool", content="rain", tool_call_id="c1", name="weather"),
        tools=TOOLS,
    )
    tool, rest = text.removeprefix("<tool>").split("<user>")
    assert json.loads(tool) == TOOLS[0]
    expected = 'And?<assistant><call c1>weather{"city": "Köln"}<tool>rain<by weather><answers c1>'
    assert rest == expected


def test_missing_tool_fields_of_a_chat_message_are_left_out_for_the_template() -> None:
    assert to_template_message(ChatMessage(role="user", content="x")) == {"role": "user", "content": "x"}


@pytest.mark.parametrize("arguments", ["[1]", "{", "nonsense", "1"])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    message = ChatMessage(role="assistant", content="", tool_calls=(ToolCall(name="f", arguments=arguments),))
    with pytest.raises(BadInput, match=r"arguments=.* of 'f' are not accepted: a JSON object"):
        to_template_message(message)


def test_empty_arguments_are_an_empty_object() -> None:
    message = ChatMessage(role="assistant", content="", tool_calls=(ToolCall(name="f", arguments=""),))
    assert to_template_message(message)["tool_calls"][0]["function"]["arguments"] == {}
