"""Request bodies mapped to engine requests; options that the engine's messages lack are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvscope_engine.http.schemas.api_errors import ApiError
from kvscope_engine.http.schemas.request_bodies import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    NEUTRAL,
    ChatBody,
    CompletionBody,
    IgnoredFields,
)
from kvscope_engine.http.schemas.responses_api import ResponsesBody
from kvscope_engine.http.schemas.sampling_mapping import (
    StreamUsage,
    chat_sampling,
    completion_sampling,
    stream_usage,
    submission,
)
from kvscope_engine.http.tool_calling.tool_call_formats import FORMATS_BY_NAME
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def completion(**fields: Any) -> CompletionBody:
    return msgspec.convert({"prompt": "x"} | fields, CompletionBody)


def chat(**fields: Any) -> ChatBody:
    return msgspec.convert({"messages": [{"role": "user", "content": "x"}]} | fields, ChatBody)


def knows(kind: type[msgspec.Struct], name: str) -> bool:
    return name in kind.__struct_fields__


def test_defaults_equal_those_of_openai() -> None:
    assert completion_sampling(completion()) == SamplingParams(max_tokens=16)
    assert chat_sampling(chat()) == SamplingParams(max_tokens=None)
    assert chat_sampling(chat(max_tokens=5, max_completion_tokens=7)).max_tokens == 7


def test_fields_with_equal_names_are_passed_on() -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "n": 2,
        "seed": -5,
        "min_tokens": 3,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
    }
    sampling = completion_sampling(completion(**given, stop="a", logprobs=4))
    assert {name: getattr(sampling, name) for name in given} == given
    assert sampling.stop == ("a",)
    assert sampling.logprobs == 4
    assert chat_sampling(chat(logprobs=True, top_logprobs=3, stop=["a", "b"])).logprobs == 3
    assert chat_sampling(chat(logprobs=True)).logprobs == 0
    assert completion_sampling(completion(**dict.fromkeys(given))) == SamplingParams(max_tokens=16)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (completion(suffix="x"), "suffix"),
        (completion(n=1, best_of=2), "best_of"),
        (completion(temperature=-1.0), "temperature"),
        (completion(stop=["x"] * 17), "stop"),
        (completion(max_tokens=0), "max_tokens"),
        (completion(logit_bias={"word": 1.0}), "logit_bias"),
    ],
)
def test_unsupported_completion_fields_are_refused(body: CompletionBody, named: str) -> None:
    with pytest.raises(ApiError) as error:
        completion_sampling(body)
    assert error.value.status == 400
    assert error.value.param == named


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (chat(top_logprobs=2), "top_logprobs"),
        (chat(modalities=["audio"]), "modalities"),
        (chat(response_format={"type": "json_schema"}), "response_format"),
        (chat(response_format={"type": "json_object"}, guided_regex="a"), "response_format"),
    ],
)
def test_unsupported_chat_fields_are_refused(body: ChatBody, named: str) -> None:
    with pytest.raises(ApiError) as error:
        chat_sampling(body)
    assert error.value.param == named


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar", 'root ::= "a"'),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ],
)
def test_structured_output_fields_are_mapped(fields: dict[str, Any], kind: str, text: Any) -> None:
    body = completion(**fields)
    if not knows(SamplingParams, "structured"):
        with pytest.raises(ApiError, match="structured is not accepted"):
            completion_sampling(body)
        return
    form: Any = getattr(completion_sampling(body), "structured")  # noqa: B009
    assert form.kind == kind
    assert form.text == text or json.loads(form.text) == text


def test_response_format_text_does_not_constrain_the_answer() -> None:
    assert chat_sampling(chat(response_format={"type": "text"})) == SamplingParams(max_tokens=None)


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [("stop_token_ids", [3, 5], (3, 5)), ("logit_bias", {"7": 1.5}, {7: 1.5})],
)
def test_options_of_newer_engines_are_mapped_or_refused(name: str, value: Any, meant: Any) -> None:
    body = completion(**{name: value})
    if knows(SamplingParams, name):
        assert getattr(completion_sampling(body), name) == meant
        return
    with pytest.raises(ApiError, match=f"{name} is not accepted"):
        completion_sampling(body)


def test_submission_has_priority_and_cache_salt() -> None:
    body = completion(priority=-3)
    submit = submission("id", body, SamplingParams(), raw=True, prompt_token_ids=(1, 2))
    assert submit == Submit(request_id="id", prompt_token_ids=(1, 2), raw=True, priority=-3)
    salted = completion(cache_salt="grain")
    if knows(Submit, "cache_salt"):
        assert getattr(submission("id", salted, SamplingParams(), raw=True, prompt="x"), "cache_salt") == "grain"  # noqa: B009
    else:
        with pytest.raises(ApiError, match="cache_salt is not accepted"):
            submission("id", salted, SamplingParams(), raw=True, prompt="x")


def test_stream_options_choose_usage_never_in_the_last_event_or_in_each_event() -> None:
    def asked(**options: bool) -> StreamUsage:
        return stream_usage(completion(stream=True, stream_options=options))

    assert stream_usage(completion(stream=True)) is StreamUsage.NONE
    assert asked(include_usage=True) is StreamUsage.LAST
    assert asked(include_usage=True, continuous_usage_stats=True) is StreamUsage.EACH
    assert asked(continuous_usage_stats=True) is StreamUsage.NONE
    with pytest.raises(ApiError, match="stream_options"):
        stream_usage(completion(stream_options={"include_usage": True}))


DOCS = (Path(__file__).parents[4] / "docs" / "reference" / "openai-api.md").read_text()


@pytest.mark.parametrize("name", IgnoredFields.__struct_fields__)
def test_ignored_fields_are_documented(name: str) -> None:
    ignored = DOCS.partition("### Accepted and ignored")[2].partition("### Accepted at")[0]
    assert f"`{name}`" in ignored


@pytest.mark.parametrize(
    ("make", "accepted"), [(completion, NEUTRAL | COMPLETION_NEUTRAL), (chat, NEUTRAL | CHAT_NEUTRAL)]
)
def test_fields_with_one_accepted_value_refuse_others(make: Any, accepted: dict[str, tuple[Any, ...]]) -> None:
    sampling = completion_sampling if make is completion else chat_sampling
    table = DOCS.partition("### Accepted at")[2].partition("### Refused")[0]
    for name, values in accepted.items():
        assert f"`{name}`" in table
        for value in (*values, None):
            assert sampling(make(**{name: value})) == sampling(make())
        other = not values[0] if values and isinstance(values[0], bool) else ["other"]
        with pytest.raises(ApiError, match=f"{name}=.* is not accepted") as error:
            sampling(make(**{name: other}))
        assert (error.value.status, error.value.param) == (400, name)


def test_every_field_of_chat_and_completion_bodies_is_documented() -> None:
    for kind in (ChatBody, CompletionBody):
        assert [name for name in kind.__struct_fields__ if f"`{name}`" not in DOCS] == []


def test_every_field_of_responses_is_documented() -> None:
    section = DOCS.partition("## Responses")[2].partition("## ")[0] + DOCS.partition("### Accepted and ignored")[0]
    ignored = set(IgnoredFields.__struct_fields__)
    assert [name for name in ResponsesBody.__struct_fields__ if name not in ignored and f"`{name}" not in section] == []


@pytest.mark.parametrize("name", FORMATS_BY_NAME)
def test_tool_call_format_is_documented(name: str) -> None:
    assert f"`{name}`" in DOCS.partition("## Tool calls")[2]
