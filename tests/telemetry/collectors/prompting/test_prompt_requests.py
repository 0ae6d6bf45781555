"""Requests sent to other engines: paths and field names."""

from __future__ import annotations

from typing import Any

import pytest

from kvscope_telemetry.collectors.external_engine import ExternalEngine
from kvscope_telemetry.collectors.prompting.completion_query import CHAT, COMPLETIONS, make_completion_query
from kvscope_telemetry.collectors.sglang import SGLANG
from kvscope_telemetry.collectors.vllm import VLLM
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import ChatMessage, Submit, ToolCall
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.structured import Structured


def fields(engine: ExternalEngine = VLLM, *, raw: bool = True, **sampling: Any) -> dict[str, Any]:
    submit = Submit(request_id="a", prompt="hello", raw=raw, sampling=SamplingParams(**sampling))
    return make_completion_query(submit, engine).fields


def test_chat_raw_and_token_prompts_use_the_right_api_path_and_body() -> None:
    def asked(**form: Any) -> tuple[str, Any]:
        question = make_completion_query(Submit(request_id="a", **form), VLLM)
        return question.path, question.fields.get("messages") or question.fields["prompt"]

    assert asked(prompt="hello") == (CHAT, [{"role": "user", "content": "hello"}])
    assert asked(prompt="hello", raw=True) == (COMPLETIONS, "hello")
    assert asked(prompt_token_ids=(1, 2)) == (COMPLETIONS, [1, 2])
    turns = (
        ChatMessage(role="assistant", content="", tool_calls=(ToolCall(id="c", name="f"),)),
        ChatMessage(role="tool", content="5", tool_call_id="c"),
    )
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert asked(messages=turns) == (
        CHAT,
        [
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "content": "5", "tool_call_id": "c"},
        ],
    )
    with pytest.raises(BadInput, match="exactly one"):
        make_completion_query(Submit(request_id="a"), VLLM)


def test_adapter_is_a_model_in_vllm_and_a_field_in_sglang() -> None:
    submit = Submit(request_id="a", prompt="hello", adapter="sql")
    asked = [make_completion_query(submit, engine).fields for engine in (VLLM, SGLANG)]
    assert [(fields.get("model"), fields.get("lora_path")) for fields in asked] == [("sql", None), (None, "sql")]
    assert not {"model", "lora_path"} & fields().keys()


@pytest.mark.parametrize("engine", [VLLM, SGLANG])
def test_sampling_defaults_are_left_to_the_server_and_set_values_are_sent(engine: str) -> None:
    """A model's publisher chooses its default sampling parameters."""
    body = fields(engine)
    assert not {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"} & body.keys()
    said = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert fields(engine, **said, top_k=0).items() >= (said | {"top_k": -1, "max_tokens": 256}).items()
    assert body["stream_options"] == {"include_usage": True}
    assert not {"seed", "n", "stop", "min_tokens", "ignore_eos", "logit_bias", "priority", "cache_salt"} & body.keys()


def test_sampling_options_are_sent_by_name() -> None:
    options = {"seed": 3, "n": 2, "min_tokens": 4, "ignore_eos": True, "top_k": 5}
    body = fields(**options, stop=("x",), stop_token_ids=(7,), logit_bias={8: -1.5})
    assert {name: body[name] for name in options} == options
    assert (body["stop"], body["stop_token_ids"], body["logit_bias"]) == (["x"], [7], {"8": -1.5})
    submit = Submit(request_id="a", prompt="x", priority=-2, cache_salt="s")
    body = make_completion_query(submit, SGLANG).fields
    assert (body["priority"], body["cache_salt"]) == (-2, "s")
    assert "max_tokens" not in fields(raw=False, max_tokens=None)


def test_structured_output_uses_the_field_names_of_each_engine() -> None:
    schema = Structured(kind="json_schema", text='{"type":"object"}')
    response_format = fields(structured=schema)["response_format"]
    assert response_format == {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    assert fields(structured=Structured(kind="json_object"))["response_format"] == {"type": "json_object"}
    regex, grammar = Structured(kind="regex", text="a+"), Structured(kind="grammar", text="root ::= [a]")
    assert fields(structured=regex)["structured_outputs"] == {"regex": "a+"}
    assert (fields(SGLANG, structured=regex)["regex"], fields(SGLANG, structured=grammar)["ebnf"]) == (
        "a+",
        "root ::= [a]",
    )
    choice = Structured(kind="choice", text='["a","b"]')
    assert fields(structured=choice)["structured_outputs"] == {"choice": ["a", "b"]}
    with pytest.raises(BadInput, match="SGLang does not support choice: send a regex instead"):
        fields(SGLANG, structured=choice)
    with pytest.raises(BadInput, match=r"json_schema='\{' is not accepted"):
        fields(structured=Structured(kind="json_schema", text="{"))


def test_unsupported_options_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match="logprobs=2 is not accepted for SGLang"):
        fields(SGLANG, logprobs=2)
    with pytest.raises(BadInput, match="max_tokens=None is not accepted"):
        fields(max_tokens=None)
    with pytest.raises(BadInput, match=r"tools='\[' is not accepted"):
        make_completion_query(Submit(request_id="a", prompt="x", tools="["), VLLM)


def test_tools_are_sent() -> None:
    tools = '[{"type": "function", "function": {"name": "time"}}]'
    query = make_completion_query(Submit(request_id="a", prompt="x", tools=tools), VLLM)
    assert query.fields["tools"] == [{"type": "function", "function": {"name": "time"}}]
