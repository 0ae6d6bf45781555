"""Prompts, conversations and token ids of requests are converted to the ids of a prompt."""

from __future__ import annotations

from typing import Any

import pytest

from kvscope_engine.inputs import prompt_token_ids
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import ChatMessage, Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams


class _Letters:
    """A tokenizer with one token per letter; its template puts 0 before each turn."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert len(text) <= 40, "a text is read that is too long anyway"
        return [ord(letter) - 96 for letter in text]

    def chat_text(self, turns: tuple[ChatMessage, ...], tools: object = None) -> str:
        return "".join(f"`{turn.content}" for turn in turns)

    def refuse_too_long(self, text: str, max_len: int) -> None:
        if len(text) > 4 * max_len:
            raise BadInput(f"the prompt has {len(text)} characters: more than {4 * max_len}")

    chat_template = "{{ messages }}"


LETTERS: Any = _Letters()


def _ids(**fields: Any) -> list[int]:
    return prompt_token_ids(Submit(request_id="r", **fields), LETTERS, 30, 10)


def test_prompt_uses_the_chat_template() -> None:
    assert _ids(prompt="ab") == [0, 1, 2]


def test_raw_prompt_does_not_use_the_chat_template() -> None:
    assert _ids(prompt="ab", raw=True) == [1, 2]


def test_conversation_uses_the_chat_template_for_each_turn() -> None:
    turns = (ChatMessage(role="user", content="a"), ChatMessage(role="assistant", content="b"))
    assert _ids(messages=turns) == [0, 1, 0, 2]


def test_token_ids_are_used_unchanged() -> None:
    assert _ids(prompt_token_ids=(3, 29)) == [3, 29]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "exactly one of"),
        ({"prompt": "a", "prompt_token_ids": (1,)}, "exactly one of"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "", "raw": True}, "the prompt is empty"),
        ({"messages": ()}, "messages is empty"),
        ({"prompt_token_ids": ()}, "prompt_token_ids is empty"),
        ({"prompt_token_ids": (1, 30)}, "token id 30 is not accepted: must be 0 to 29"),
        ({"prompt_token_ids": (-1,)}, "token id -1 is not accepted"),
        ({"prompt": "a" * 40}, "41 characters: more than 40"),
        ({"prompt": "a", "tools": "[{}]"}, "the model's chat template does not show them"),
        ({"prompt": "a", "tools": "{}"}, "tools='{}' is not accepted: must be a JSON array of objects"),
        ({"prompt": "a", "sampling": SamplingParams(stop_token_ids=(3, 30))}, "token 30 of stop_token_ids"),
        (
            {"prompt": "a", "sampling": SamplingParams(logit_bias={30: 1.0})},
            "token 30 of logit_bias is not accepted: must be 0",
        ),
    ],
)
def test_invalid_input_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        _ids(**fields)


def test_model_without_a_tokenizer_accepts_only_token_ids() -> None:
    assert prompt_token_ids(Submit(request_id="r", prompt_token_ids=(1,)), None, 30, 10) == [1]
    with pytest.raises(BadInput, match="no tokenizer"):
        prompt_token_ids(Submit(request_id="r", prompt="a"), None, 30, 10)


def test_stop_strings_need_a_tokenizer() -> None:
    submit = Submit(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(stop=("a",)))
    assert prompt_token_ids(submit, LETTERS, 30, 10) == [1]
    with pytest.raises(BadInput, match="stop is not accepted: this model has no tokenizer"):
        prompt_token_ids(submit, None, 30, 10)
