"""An engine without options gives the tokens of transformers with the dequantized weights.

A hundred prompts (greedy_prompts.jsonl: languages, code, sums, lists; chats and plain texts) are answered greedily,
and one pass of transformers' model over each answer shows whether every token was the likeliest after those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from kvscope_engine import Engine, EngineConfig, SamplingParams
from kvscope_engine.cli.arguments.prompt_options import read_prompts
from kvscope_telemetry.messages.commands import Submit

pytestmark = pytest.mark.timeout(1_500)

PROMPTS: Final = Path(__file__).with_name("greedy_prompts.jsonl")
MAX_TOKENS: Final = 48
GREEDY: Final = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
STEPS: Final = {"float32": 2.0**-23, "bfloat16": 2.0**-7}
"""The largest relative distance between two neighboring numbers of a dtype."""
MOST_STEPS: Final = 2.0
"""Every layer rounds: of 4,311 tokens one was chosen although another was 1.3 steps of bfloat16 likelier."""


@dataclass(frozen=True)
class DifferentToken:
    """A token that differs from transformers."""

    prompt: str
    place: int
    gap: float
    """How much larger the logit of transformers' own token is in transformers."""
    logit: float
    """The logit of transformers' own token."""


@pytest.fixture(scope="module")
def submits(storm: Callable[[int, int], int], amount: Callable[[int, int], int]) -> list[Submit]:
    every = 100 // amount(storm(4, 25), 100)
    return read_prompts([], PROMPTS, GREEDY, raw=False)[::every]


@pytest.fixture(scope="module")
def widened_model() -> Any:
    """The model in float32, as transformers computes it."""
    from transformers import AutoModelForCausalLM

    from kvscope_engine.model.loader.download.default_model import default_gguf
    from kvscope_engine.model.loader.gguf.gguf_cache import converted_gguf

    folder = converted_gguf(default_gguf(lambda progress: None), torch.float32, lambda progress: None)
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32)


def test_engine_without_options_knows_the_capital_of_france() -> None:
    with Engine(EngineConfig(device="cpu", num_gpu_blocks_override=64)) as engine:
        (completion,) = engine.generate(["What is the capital of France?"], GREEDY)
    assert completion.text == "The capital of France is Paris."


@pytest.mark.storm({"dtype": "float32"})  # `test_same_tokens` uses this dtype
@pytest.mark.parametrize("dtype", STEPS)
def test_greedy_tokens_equal_the_dequantized_model(submits: list[Submit], widened_model: Any, dtype: str) -> None:
    """Near ties are accepted: logits that differ by a few roundings of the dtype."""
    config = EngineConfig(dtype=dtype, device="cpu", num_gpu_blocks_override=512)
    with Engine(config) as engine:
        prompts = [_token_ids(engine.tokenizer, submit) for submit in submits]
        asked = [Submit(request_id=str(i), prompt_token_ids=ids, sampling=GREEDY) for i, ids in enumerate(prompts)]
        answers = [completion.token_ids for completion in engine.generate(asked)]
    assert all(answers)
    found = [
        other
        for submit, prompt, said in zip(submits, prompts, answers, strict=True)
        for other in _different_tokens(widened_model, [*prompt], said, _text(submit))
    ]
    print(f"{sum(map(len, answers))} tokens, others than transformers':", *found, sep="\n")
    assert len(found) <= 0.02 * sum(map(len, answers))
    assert [other for other in found if other.gap > abs(other.logit) * MOST_STEPS * STEPS[dtype]] == []


def _text(submit: Submit) -> str:
    return submit.messages[-1].content if submit.messages else submit.prompt or ""


def _token_ids(tokenizer: Any, submit: Submit) -> tuple[int, ...]:
    ids = tokenizer.chat(submit.messages) if submit.messages else tokenizer.encode(submit.prompt)
    return tuple(ids)


def _different_tokens(module: Any, prompt: list[int], said: list[int], text: str) -> Iterator[DifferentToken]:
    with torch.inference_mode():
        logits = module(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
    for place, (row, token) in enumerate(zip(logits, said, strict=True)):
        largest = float(row.max())
        if int(row.argmax()) != token:
            yield DifferentToken(text, place, largest - float(row[token]), largest)
