"""Follow-ups with the tokens of earlier answers: as they were generated, unless their text would differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvscope_engine import Engine, EngineConfig, SamplingParams
from kvscope_engine.inputs import prompt_token_ids
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.messages.commands import ChatMessage, Submit

BLOCK_SIZE = 16
USER = ChatMessage(role="user", content="Hello")


def prompt_of(tokenizer: Tokenizer, *messages: ChatMessage) -> list[int]:
    return prompt_token_ids(Submit(request_id="r", messages=messages), tokenizer, tokenizer.vocab_size, 4096)


def split_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return tokens of `text` that differ from those of the tokenizer: one for each letter."""
    return [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False)]


def test_generated_tokens_replace_those_of_the_text(default_tokenizer: Tokenizer) -> None:
    ids = split_ids(default_tokenizer, "strawberry")
    answer = ChatMessage(role="assistant", content="strawberry", token_ids=tuple(ids))
    plain = ChatMessage(role="assistant", content="strawberry")
    found, usual = (prompt_of(default_tokenizer, USER, one, USER) for one in (answer, plain))
    assert default_tokenizer.decode(found) == default_tokenizer.decode(usual)
    assert found != usual
    start = found.index(ids[0])
    assert found[start : start + len(ids)] == ids
    assert found[:start] == usual[:start]


def test_end_of_sequence_token_of_an_answer_is_not_repeated(default_tokenizer: Tokenizer) -> None:
    end = min(default_tokenizer.special_token_ids)
    ids = split_ids(default_tokenizer, "berry")
    answers = [ChatMessage(role="assistant", content="berry", token_ids=tuple(given)) for given in (ids, [*ids, end])]
    first, second = (prompt_of(default_tokenizer, USER, answer, USER) for answer in answers)
    assert first == second


@pytest.mark.parametrize("token_ids", [(5, 6, 7), (1 << 30,), (-1,)], ids=["other text", "too large", "negative"])
def test_tokens_with_another_text_are_ignored(default_tokenizer: Tokenizer, token_ids: tuple[int, ...]) -> None:
    answer = ChatMessage(role="assistant", content="strawberry", token_ids=token_ids)
    plain = ChatMessage(role="assistant", content="strawberry")
    assert prompt_of(default_tokenizer, USER, answer, USER) == prompt_of(default_tokenizer, USER, plain, USER)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(device="cpu", num_gpu_blocks_override=256, max_model_len=2048, block_size=BLOCK_SIZE)
    with Engine(config) as engine:
        yield engine


def test_each_follow_up_of_ten_turns_finds_all_full_blocks_of_the_turns_before(engine: Engine) -> None:
    """With the default model, whose answers are often tokenized in another way than they were generated."""
    topics = ("rivers", "bees", "Mars", "violins", "salt", "maps", "ice", "tea", "bridges", "owls")
    messages: list[ChatMessage] = []
    num_known = 0
    reports: list[tuple[int, int]] = []
    for turn, topic in enumerate(topics):
        messages.append(ChatMessage(role="user", content=f"Tell me something about {topic}."))
        sampling = SamplingParams(temperature=0.9, seed=turn, max_tokens=60)
        submit: Any = Submit(request_id=f"turn-{turn}", messages=tuple(messages), sampling=sampling)
        (answer,) = engine.generate([submit])
        reports.append((answer.usage.cached_tokens, num_known // BLOCK_SIZE * BLOCK_SIZE))
        num_known = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1  # the last token is not computed
        messages.append(ChatMessage(role="assistant", content=answer.text, token_ids=tuple(answer.token_ids)))
    assert [cached for cached, _ in reports] == [expected for _, expected in reports]
