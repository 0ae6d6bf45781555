"""OpenAI's client requests structured output, logit biases, stop tokens and cache salts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from tests.engine.http.served import Served

from kvscope_engine import Engine, EngineConfig
from kvscope_telemetry.messages.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(
    "structured" not in SamplingParams.__struct_fields__, reason="this engine knows none of them"
)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED: Any = {"model": "default", "messages": [{"role": "user", "content": "Make up a person."}], "temperature": 0}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    config = EngineConfig(device="cpu", num_gpu_blocks_override=512, max_num_seqs=32)

    def build(progress: Any, publish: Any, messages_dropped: Any) -> Engine:
        return Engine(config, progress=progress, publish=publish, messages_dropped=messages_dropped)

    one = Served(build=build)
    yield one
    one.close()


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    host, port = served.address
    with openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_json_schema_is_followed(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    answer = client.chat.completions.create(**ASKED, max_tokens=100, response_format=form).choices[0]
    assert answer.finish_reason == "stop"
    person = json.loads(answer.message.content or "")
    assert person.keys() == {"name", "age"}
    assert isinstance(person["age"], int)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[A-C]{3}-[0-9]{2}"}, "[A-C]{3}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_grammar": 'root ::= "a" "b"'}, "ab"),
    ],
)
def test_vllm_structured_output_fields_are_followed(client: openai.OpenAI, fields: Any, pattern: str) -> None:
    answer = client.chat.completions.create(**ASKED, max_tokens=30, extra_body=fields).choices[0]
    assert re.fullmatch(pattern, answer.message.content or "")


def test_invalid_regex_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**ASKED, max_tokens=5, extra_body={"guided_regex": "("})


def test_too_costly_grammar_is_refused_without_delaying_others(client: openai.OpenAI) -> None:
    with client.chat.completions.create(**ASKED, max_tokens=200, stream=True) as stream:
        with pytest.raises(openai.APIStatusError, match=r"regex is too costly|regex was not compiled"):  # or: too busy
            client.chat.completions.create(**ASKED, extra_body={"guided_regex": "(.{1,60}){1,60}(.{1,60}){1,60}"})
        assert list(stream)
    with pytest.raises(openai.BadRequestError, match="'not' is not enforced"):
        client.chat.completions.create(**ASKED, extra_body={"guided_json": {"not": {}}})


def test_logit_bias_and_stop_token_ids_apply(client: openai.OpenAI, served: Served) -> None:
    (token,) = served.engine.tokenizer.encode(" Paris")
    asked: Any = {"model": "default", "prompt": "x", "temperature": 0, "max_tokens": 3}
    assert client.completions.create(**asked, logit_bias={str(token): 100}).choices[0].text == " Paris Paris Paris"
    stopped = client.completions.create(**asked, logit_bias={str(token): 100}, extra_body={"stop_token_ids": [token]})
    assert stopped.choices[0].finish_reason == "stop"


def test_cache_salts_separate_the_prefix_cache(client: openai.OpenAI) -> None:
    asked: Any = {"model": "default", "prompt": "The same long beginning, " * 20, "max_tokens": 1}

    def cached(salt: str) -> int:
        usage = client.completions.create(**asked, extra_body={"cache_salt": salt}).usage
        assert usage is not None
        return usage.prompt_tokens_details.cached_tokens or 0 if usage.prompt_tokens_details else 0

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0


WEATHER: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Paris"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "maxProperties": 0}}},
]


def test_required_tool_choice_forces_a_call(client: openai.OpenAI) -> None:
    asked = ASKED | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls or []
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    fields = {"weather": {"city", "days"}, "time": set()}
    assert json.loads(call.function.arguments).keys() == fields[call.function.name]


def test_named_tool_choice_forces_a_streamed_call(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    asked = ASKED | {"tools": TOOLS, "tool_choice": choice, "max_tokens": 400, "stream": True}
    pieces = [chunk.choices[0] for chunk in client.chat.completions.create(**asked)]
    (call,) = [one for piece in pieces for one in piece.delta.tool_calls or []]
    assert call.function is not None
    assert (call.index, call.function.name) == (0, "weather")
    assert json.loads(call.function.arguments or "").keys() == {"city", "days"}
    assert "".join(piece.delta.content or "" for piece in pieces) == ""
    assert pieces[-1].finish_reason == "tool_calls"


def test_tool_with_an_invalid_schema_is_refused(client: openai.OpenAI) -> None:
    broken: Any = [{"type": "function", "function": {"name": "x", "parameters": {"type": "nonsense"}}}]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**ASKED, max_tokens=5, tools=broken, tool_choice="required")
