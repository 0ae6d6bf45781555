"""Answers of the default model in the engine: text, stop strings, limits and the text of blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from kvscope_engine import Completion, Engine, EngineConfig, SamplingParams
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import ChatMessage, Finished, Submit, Tokens

PROMPT = "Tell me a story about a lighthouse keeper and a storm."
NUM_TOKENS = 28


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(EngineConfig(dtype="float32", device="cpu", num_gpu_blocks_override=128)) as engine:
        yield engine


@pytest.fixture(scope="module")
def answer(engine: Engine) -> Completion:
    """The greedy answer of `NUM_TOKENS` tokens."""
    return ask(engine)


def ask(engine: Engine, prompt: str = PROMPT, **options: Any) -> Completion:
    values: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS} | options
    (completion,) = engine.generate([prompt], SamplingParams(**values))
    assert not engine.has_unfinished
    return completion


def test_text_equals_the_decoded_tokens(engine: Engine, answer: Completion) -> None:
    assert engine.tokenizer is not None
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == NUM_TOKENS
    assert answer.text == engine.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert "lighthouse" in answer.text
    chat = engine.tokenizer.chat((ChatMessage(role="user", content=PROMPT),))
    assert answer.usage.prompt_tokens == len(chat)


def test_answer_ends_with_end_of_sequence(engine: Engine) -> None:
    short = ask(engine, "What is the capital of France? Answer in one word.", max_tokens=18)
    assert short.finish_reason == "stop"
    assert "<|im_end|>" not in short.text
    assert short.usage.completion_tokens == len(short.token_ids) < 18
    on = ask(engine, "What is the capital of France? Answer in one word.", max_tokens=20, ignore_eos=True)
    assert on.token_ids[: len(short.token_ids)] == short.token_ids
    assert (on.finish_reason, len(on.token_ids)) == ("length", 20)


@pytest.mark.parametrize("place", [(10, 16), (30, 33), (60, 75)])
def test_text_ends_before_a_stop_string_anywhere_in_the_tokens(
    engine: Engine, answer: Completion, place: tuple[int, int]
) -> None:
    """The stop string is cut from the text without regard to tokens; a second one never occurs."""
    stop = answer.text[slice(*place)]
    found = answer.text.index(stop)
    stopped = ask(engine, stop=("never said at all", stop))
    assert stopped.finish_reason == "stop"
    assert stopped.text == answer.text[:found]
    assert stopped.token_ids == answer.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) < NUM_TOKENS


def test_stop_string_over_several_tokens_is_never_sent_in_part(engine: Engine, answer: Completion) -> None:
    """The streamed text so far is always a beginning of the text before the stop string."""
    assert engine.tokenizer is not None
    stop = engine.tokenizer.decode(answer.token_ids[8:12])
    expected = answer.text[: answer.text.index(stop)]
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, stop=(stop,))
    engine.submit(Submit(request_id="a", prompt=PROMPT, sampling=sampling))
    text = ""
    while engine.has_unfinished:
        for message in engine.step():
            if isinstance(message, Tokens):
                text += message.text
                assert expected.startswith(text)
            else:
                assert isinstance(message, Finished)
                assert message.usage.completion_tokens == 12
    assert text == expected


def test_stop_string_before_min_tokens_does_not_stop(engine: Engine, answer: Completion) -> None:
    assert engine.tokenizer is not None
    stop = engine.tokenizer.decode(answer.token_ids[3:5])
    place = answer.text.index(stop)
    again = answer.text.find(stop, place + 1)
    later = ask(engine, stop=(stop,), min_tokens=12)
    assert len(later.token_ids) > 12
    assert later.text == (answer.text if again < 0 else answer.text[: answer.text.index(stop, again)])
    short = "What is the capital of France? Answer in one word."
    held = ask(engine, short, min_tokens=16, max_tokens=20)
    assert len(held.token_ids) >= 16


def test_log_probabilities_are_sorted_and_add_up(engine: Engine, answer: Completion) -> None:
    asked = ask(engine, logprobs=20)
    assert asked.token_ids == answer.token_ids
    for entry in asked.logprobs:
        values = [value for _, value in entry.top]
        assert entry.top[0] == (entry.token_id, entry.logprob)
        assert values == sorted(values, reverse=True)
        assert 0.2 < sum(map(math.exp, values)) <= 1.0 + 1e-5


def test_penalties_reduce_repetition(engine: Engine) -> None:
    penalties: tuple[dict[str, float], ...] = (
        {},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
    )
    samplings = [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, **some) for some in penalties]
    submits = [Submit(request_id="-", prompt="Write: ha ha ha ha ha", sampling=sampling) for sampling in samplings]
    answers = [completion.token_ids for completion in engine.generate(submits)]
    plain, *others = [len(set(ids)) / len(ids) for ids in answers]
    assert all(share > plain for share in others)


def test_invalid_prompts_end_with_an_error(engine: Engine) -> None:
    before = engine.snapshot().blocks
    submits = [
        Submit(request_id="-", prompt=""),
        Submit(request_id="-", prompt="", raw=True),
        Submit(request_id="-", messages=()),
        Submit(request_id="-", prompt="word " * 20_000),
        Submit(request_id="-", prompt="x" * (4 << 20)),
        Submit(request_id="-", prompt="\ud800"),
        Submit(request_id="-", prompt_token_ids=(49152,)),
        Submit(request_id="-", prompt="too many", sampling=SamplingParams(max_tokens=1 << 20, min_tokens=1 << 19)),
    ]
    completions = list(engine.generate(submits))
    for completion in completions[:7]:
        assert (completion.finish_reason, completion.token_ids) == ("error", [])
        assert "\n" not in completion.error
        assert len(completion.error) < 300
    assert completions[7].finish_reason == "error"
    assert "the whole pool has 128" in completions[7].error
    assert engine.snapshot().blocks == before


def test_block_text_of_shared_and_cached_blocks_is_returned(engine: Engine) -> None:
    engine.reset_prefix_cache()
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    system = ChatMessage(role="system", content="You are a gardener who knows every plant by its Latin name.")
    numbers = []
    for name in ("roses", "tulips"):
        messages = (system, ChatMessage(role="user", content=f"Tell me of {name}."))
        submit = Submit(request_id=name, messages=messages, sampling=sampling)
        numbers += engine.submit(submit).numbers
        engine.step()
    requests, ledger = engine.components.scheduler.requests, engine.components.pool.ledger
    first, second = (requests[number] for number in numbers)
    shared = [block for block in first.block_table if block in second.block_table]
    assert shared
    assert set(ledger.ref_count[shared]) == {2}
    assert "gardener" in "".join(content.text for content in engine.block_text(shared))
    for request, name in ((first, "roses"), (second, "tulips")):
        text = "".join(content.text for content in engine.block_text(request.block_table))
        assert f"Tell me of {name}." in text
    table = list(first.block_table)
    while engine.has_unfinished:
        engine.step()
    full = table[: first.num_prompt_tokens // 16]
    assert set(ledger.state[full]) == {BlockState.CACHED}
    assert "gardener" in "".join(content.text for content in engine.block_text(full))
    engine.reset_prefix_cache()
    assert "".join(content.text for content in engine.block_text(table)) == ""
