"""Log-probabilities of prompt tokens equal those of transformers, however the prompt is computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvscope_engine import Engine, EngineConfig, SamplingParams
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Submit, TokenLogprobs

TOLERANCE = 2e-4
SCORED = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=2)


def expected_scores(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities that transformers gives the tokens after each position but the last."""
    with torch.inference_mode():
        return torch.log_softmax(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float(), -1)


def check(scores: list[TokenLogprobs], model: Any, ids: list[int]) -> None:
    expected = expected_scores(model, ids)
    assert [entry.token_id for entry in scores] == ids[1:]
    for row, entry in zip(expected, scores, strict=True):
        own = row[entry.token_id]
        assert entry.logprob == pytest.approx(float(own), abs=TOLERANCE)
        nearly_equal = int(((row - own).abs() < TOLERANCE).sum())
        assert abs(entry.rank - 1 - int((row > own).sum())) < nearly_equal
        assert [logprob for _, logprob in entry.top] == pytest.approx(row.topk(2).values.tolist(), abs=TOLERANCE)


@pytest.fixture
def make_engine(tmp_path: Path) -> Callable[..., Engine]:
    def make(model: Any, **options: Any) -> Engine:
        model.save_pretrained(tmp_path)
        config = {"block_size": 4, "num_gpu_blocks_override": 90, "max_num_batched_tokens": 24} | options
        return Engine(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", **config))

    return make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])  # gemma2 caps the logits after its head
def test_scores_of_chunked_and_repeated_prompts_equal_transformers(
    vivid_model: Callable[..., Any], make_engine: Callable[..., Engine], model_type: str
) -> None:
    model = vivid_model(model_type)
    prompts = [random.Random(size).choices(range(3, 250), k=size) for size in (1, 2, 9, 70)]
    submits = [Submit(request_id="-", prompt_token_ids=tuple(ids), sampling=SCORED) for ids in [*prompts, prompts[-1]]]
    with make_engine(model) as engine:
        together = list(engine.generate(submits))
        again = list(engine.generate(submits[3:4]))  # its blocks are cached, and computed all the same
    for ids, one in zip([*prompts, prompts[-1], prompts[-1]], [*together, *again], strict=True):
        check(one.prompt_logprobs, model, ids)
    assert again[0].usage.cached_tokens == 0
    assert again[0].token_ids == together[-1].token_ids


@pytest.mark.filterwarnings("ignore")
def test_scores_of_a_preempted_prompt_are_returned_once(
    vivid_model: Callable[..., Any], make_engine: Callable[..., Engine]
) -> None:
    model = vivid_model("llama")
    prompts = [random.Random(size).choices(range(3, 250), k=40) for size in range(4)]
    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, prompt_logprobs=2)
    submits = [Submit(request_id="-", prompt_token_ids=tuple(ids), sampling=sampling) for ids in prompts]
    with make_engine(model, num_gpu_blocks_override=30) as engine:
        completions = list(engine.generate(submits))
        assert engine.components.scheduler.totals.preemptions > 0
    for ids, one in zip(prompts, completions, strict=True):
        check(one.prompt_logprobs, model, ids)


@pytest.mark.filterwarnings("ignore")
def test_only_the_first_completion_of_a_prompt_has_its_scores(
    vivid_model: Callable[..., Any], make_engine: Callable[..., Engine]
) -> None:
    model = vivid_model("llama")
    ids = random.Random(0).choices(range(3, 250), k=21)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, n=2, prompt_logprobs=2)
    with make_engine(model) as engine:
        first, second = engine.generate([Submit(request_id="-", prompt_token_ids=tuple(ids), sampling=sampling)])
    check(first.prompt_logprobs, model, ids)
    assert second.prompt_logprobs == []


@pytest.mark.filterwarnings("ignore")
def test_prompt_logprobs_of_a_deterministic_engine_are_refused(
    vivid_model: Callable[..., Any], make_engine: Callable[..., Engine]
) -> None:
    with make_engine(vivid_model("llama"), deterministic=True) as engine:
        submit = Submit(request_id="-", prompt_token_ids=(5, 6), sampling=SCORED)
        with pytest.raises(BadInput, match="prompt_logprobs=2 is not accepted: with --deterministic"):
            engine.submit(submit)
