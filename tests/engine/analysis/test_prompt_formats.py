"""Prompts are found in each accepted format of a request file; anything else is refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from kvscope_engine.analysis.prompt_formats import FilePrompt, prompts_of
from kvscope_telemetry.errors import BadInput

QUESTION = {"role": "user", "content": "Why?"}


def test_line_of_a_batch_file_holds_the_body_of_a_request() -> None:
    record = {"custom_id": "1", "method": "POST", "body": {"model": "m", "messages": [QUESTION]}}
    assert prompts_of(record) == [FilePrompt(messages=(QUESTION,))]


def test_each_answer_of_a_conversation_is_a_request_with_the_turns_before_it() -> None:
    turns = [("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"), ("human", "e")]
    prompts = prompts_of({"conversations": [{"from": role, "value": text} for role, text in turns]})
    assert [[message["content"] for message in prompt.messages] for prompt in prompts] == [["a"], ["a", "b", "c"]]
    assert [message["role"] for message in prompts[1].messages] == ["user", "assistant", "user"]


def test_completions_have_texts_or_token_ids() -> None:
    assert prompts_of({"prompt": "a", "output_tokens": 5}) == [FilePrompt(text="a")]
    assert prompts_of({"prompt": [1, 2]}) == [FilePrompt(token_ids=(1, 2))]
    assert prompts_of({"prompt": ["a", "b"]}) == [FilePrompt(text="a"), FilePrompt(text="b")]
    assert prompts_of({"prompt": ["a", [1, 2]]}) == [FilePrompt(text="a"), FilePrompt(token_ids=(1, 2))]


def test_prompts_of_requests_that_define_or_call_functions_are_marked() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert [
        prompts_of(record)[0].has_functions
        for record in (
            {"messages": [QUESTION], "tools": [{"type": "function"}]},
            {"messages": [QUESTION, call]},
            {"messages": [QUESTION], "tools": []},
        )
    ] == [True, True, False]


def test_equal_images_have_equal_placeholders() -> None:
    def prompt(url: str) -> FilePrompt:
        parts = [{"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": url}}]
        return prompts_of({"messages": [{"role": "user", "content": parts}]})[0]

    assert prompt("x.png").num_images == 1
    assert prompt("x.png") == prompt("x.png") != prompt("y.png")
    assert prompt("x.png").messages[0]["content"].startswith("See <image ")


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ([1], "an object with `messages`"),
        ({"foo": 1}, "the keys foo"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "king", "content": "a"}]}, "role='king'"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "part .*sound"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "without an answer"),
        ({"prompt": [-1]}, "token id"),
        ({"prompt": [1, "a"]}, "prompt="),
        ({"hash_ids": [1], "input_length": 0}, "input_length=0"),
        ({"prompt": [[[1]]]}, "prompt="),
        ({"prompt": [[]]}, "prompt="),
        ({"hash_ids": ["a"], "input_length": 5}, "hash_ids="),
        ({"hash_ids": [1, 1, 1], "input_length": 2048}, "hash_ids has an id twice"),
        ({"hash_ids": [1], "input_length": 5120}, "input_length 5120 is not accepted with 1 hash ids"),
    ],
)
def test_other_records_are_refused_with_what_is_accepted(record: Any, named: str) -> None:
    with pytest.raises(BadInput, match=named):
        prompts_of(record)
