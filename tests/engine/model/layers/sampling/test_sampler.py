"""The sampler compared with a slow row-by-row reference and with transformers' logits processors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvscope_engine.model.layers.sampling.sampler import Sampler
from kvscope_engine.policy.request import Request
from kvscope_kernels import ops_for
from kvscope_kernels.logits.draw_tokens import draw
from kvscope_kernels.logits.random_numbers import keys
from kvscope_kernels.logits.token_filter import thresholds
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.sampling_params import ResolvedSampling

VOCABULARY = 700
EOS = 2


def make_request(number: int, output: Sequence[int] = (), prompt: Sequence[int] = (5, 6, 5), **options: Any) -> Request:
    return Request(
        number=number,
        request_id=f"r{number}",
        prompt_token_ids=list(prompt),
        sampling=ResolvedSampling(**options),
        max_tokens=99,
        arrival_ns=0,
        output_token_ids=list(output),
    )


def reference_probabilities(logits: NDArray[Any], request: Request) -> NDArray[Any]:
    """Return the remaining probabilities of a row in float64, straight from the definitions."""
    options = request.sampling
    scores = logits.astype(np.float64).copy()
    for token, bias in options.logit_bias.items():
        scores[token] += bias
    for token in range(len(scores)):
        said = request.output_token_ids.count(token)
        if said or token in request.prompt_token_ids:
            scores[token] *= options.repetition_penalty if scores[token] <= 0 else 1 / options.repetition_penalty
        scores[token] -= options.frequency_penalty * said + options.presence_penalty * (said > 0)
    if len(request.output_token_ids) < options.min_tokens:
        scores[[EOS, *options.stop_token_ids]] = -math.inf
    if options.temperature == 0.0:
        chosen: NDArray[Any] = (np.arange(len(scores)) == scores.argmax()).astype(np.float64)
        return chosen
    scores /= options.temperature
    weights = np.exp(scores - scores.max())
    weights[weights < options.min_p] = 0.0
    if 0 < options.top_k < len(scores):
        weights[weights < np.sort(weights)[-options.top_k]] = 0.0
    if options.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        before = weights[order].cumsum() - weights[order]
        dropped = before >= options.top_p * weights.sum()
        dropped[0] = False
        weights[order[dropped]] = 0.0
    probabilities: NDArray[Any] = weights / weights.sum()
    return probabilities


def reference_token(logits: NDArray[Any], request: Request) -> int:
    probabilities = reference_probabilities(logits, request)
    if request.sampling.temperature == 0.0:
        return int(probabilities.argmax())
    seed = request.sampling.seed
    assert seed is not None
    key = torch.from_numpy(keys([seed], [len(request.output_token_ids)]))
    return int(draw(torch.from_numpy(probabilities)[None], key))


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 65},
    {"top_k": 100},
    {"top_k": 699},
    {"top_k": 5000},
    {"top_k": -1, "top_p": 0.5},
    {"top_p": 1e-6},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 20.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.01, "temperature": 1.7},
    {"top_p": 0.95, "min_p": 0.02, "temperature": 8.0},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7, "temperature": 0.0},
    {"repetition_penalty": 1.8, "top_p": 0.8},
    {"repetition_penalty": 0.4, "presence_penalty": -2.0, "frequency_penalty": 2.0},
    {"min_tokens": 50},
    {"min_tokens": 50, "temperature": 0.0},
    {"min_tokens": 50, "temperature": 0.0, "stop_token_ids": (4, 11)},
    {"logit_bias": {EOS: -100.0, 9: 5.5, 699: 3.25}},
    {"logit_bias": {3: 100.0}, "temperature": 0.0},
    {"logit_bias": {30: 2.5, 31: -1.5}, "repetition_penalty": 1.5, "presence_penalty": 0.5, "top_p": 0.9},
]


def _said(rng: np.random.Generator) -> list[int]:
    tokens: list[int] = rng.integers(0, 40, rng.integers(0, 30)).tolist()
    return tokens


def make_batch(seed: int) -> tuple[NDArray[Any], list[Request]]:
    """Return a row for each option, with a dominant end-of-sequence logit in some."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (len(OPTIONS), VOCABULARY)).astype(np.float32)
    logits[rng.random(len(OPTIONS)) < 0.4, EOS] = 15.0
    requests = [
        make_request(
            row + 1, rng.integers(0, 40, rng.integers(0, 30)).tolist(), **({"seed": seed * 100 + row} | options)
        )
        for row, options in enumerate(OPTIONS)
    ]
    return logits, requests


@pytest.mark.parametrize("seed", range(12))
def test_sampled_tokens_equal_the_reference_for_every_sampling_option(seed: int) -> None:
    logits, requests = make_batch(seed)
    tokens, logprobs = Sampler([EOS], VOCABULARY, ops_for("cpu")).sample(torch.from_numpy(logits.copy()), requests)
    assert logprobs == []
    assert tokens == [reference_token(row, request) for row, request in zip(logits, requests, strict=True)]


def test_request_sampled_alone_gets_the_same_token_as_in_a_batch() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits, requests = make_batch(99)
        given = torch.from_numpy(logits).to(dtype)
        together, _ = Sampler([EOS], VOCABULARY, ops_for("cpu")).sample(given.clone(), requests)
        alone = [
            Sampler([EOS], VOCABULARY, ops_for("cpu")).sample(given[row : row + 1].clone(), [request])[0][0]
            for row, request in enumerate(requests)
        ]
        backwards, _ = Sampler([EOS], VOCABULARY, ops_for("cpu")).sample(given.flip(0), requests[::-1])
        assert together == alone == backwards[::-1]


def thresholds_of(logits: torch.Tensor, weights: torch.Tensor, options: Sequence[ResolvedSampling]) -> torch.Tensor:
    """Return thresholds for numeric options, as the operation takes them."""
    rows = [(option.temperature, max(option.top_k, 0), option.top_p, option.min_p) for option in options]
    return thresholds(logits, weights, torch.tensor(rows, dtype=torch.float64))


def test_top_p_threshold_counts_tied_logits_beyond_the_sorted_ones() -> None:
    logits = torch.full((2, 3000), -1.0)
    logits[:, :500] = 2.0
    logits[:, 0] = 3.0
    options = [ResolvedSampling(top_k=3, top_p=0.5), ResolvedSampling(top_k=3, top_p=0.001)]
    weights = (logits - 3.0).exp()
    assert thresholds_of(logits, weights, options).tolist() == [2.0, 3.0]


def test_ties_at_the_threshold_are_all_kept() -> None:
    logits = torch.zeros(3, 3000)
    options = [ResolvedSampling(top_k=3), ResolvedSampling(top_k=1500), ResolvedSampling(top_p=0.01)]
    weights = torch.ones_like(logits)
    assert thresholds_of(logits, weights, options).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [1.0, 3.0, 50.0])
def test_top_p_and_min_p_keep_the_right_tokens_even_if_nearly_all_are_kept(temperature: float) -> None:
    """From a few tokens to nearly all of 5,000."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 4, (6, 5000)).astype(np.float32) / np.float32(temperature)
    options = [ResolvedSampling(top_p=p, min_p=m) for p in (0.1, 0.9, 0.9999) for m in (0.0, 0.001)]
    weights = np.exp(logits - logits.max(1, keepdims=True))
    found = thresholds_of(torch.from_numpy(logits), torch.from_numpy(weights), options)
    for row, option, threshold in zip(logits, options, found.tolist(), strict=True):
        request = make_request(1, top_p=option.top_p, min_p=option.min_p)
        request.prompt_token_ids.clear()
        kept = reference_probabilities(row, request) > 0
        assert (
            abs(int((row >= threshold).sum()) - int(kept.sum())) <= 1
        )  # the last bit of a sum may move the threshold by one token


@pytest.mark.parametrize(
    ("name", "argument", "options"),
    [
        ("TopKLogitsWarper", {"top_k": 12}, {"top_k": 12}),
        ("TopPLogitsWarper", {"top_p": 0.8}, {"top_p": 0.8}),
        ("MinPLogitsWarper", {"min_p": 0.1}, {"min_p": 0.1}),
    ],
)
def test_filters_keep_the_same_tokens_as_transformers(
    name: str, argument: dict[str, Any], options: dict[str, Any]
) -> None:
    import transformers

    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 2, (20, VOCABULARY)).astype(np.float32))
    processor: Any = getattr(transformers, name)(**argument)
    expected = processor(None, logits.clone()) > -torch.inf
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    found = thresholds_of(logits, weights, [ResolvedSampling(**options)] * 20)
    assert torch.equal(logits >= found[:, None], expected)


def test_repetition_penalty_equals_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 2, (1, VOCABULARY)).astype(np.float32))
    request = make_request(1, [9, 9, 400], [3, 9, 17], repetition_penalty=1.3, temperature=0.0)
    processor: Any = RepetitionPenaltyLogitsProcessor(1.3)
    expected = processor(torch.tensor([[3, 9, 17, 9, 9, 400]]), logits.clone())
    changed = logits.clone()
    sampler = Sampler([], VOCABULARY, ops_for("cpu"))
    sampler.sample(changed, [request])
    torch.testing.assert_close(changed, expected)


def test_penalties_follow_a_request_through_its_steps() -> None:
    sampler = Sampler([], VOCABULARY, ops_for("cpu"))
    request = make_request(1, temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5)
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [10, 11, 12]] = torch.tensor([4.0, 3.2, 2.9])
    for _ in range(6):
        request.output_token_ids += sampler.sample(logits.clone(), [request])[0]
    # 10 falls to 2.5, then 11 to 1.7, 12 to 1.4, then 10 again to 2.0, 1.5, and 11
    assert request.output_token_ids == [10, 11, 12, 10, 10, 11]


def test_penalty_counts_of_finished_requests_are_freed() -> None:
    sampler = Sampler([], VOCABULARY, ops_for("cpu"))
    for number in range(200):
        request = make_request(number, temperature=0.0, repetition_penalty=1.1)
        sampler.sample(torch.zeros(1, VOCABULARY), [request])
        request.state = RequestState.FINISHED
    assert len(sampler._penalties._counts) < 70


def test_logit_biases_of_finished_requests_are_freed() -> None:
    sampler = Sampler([], VOCABULARY, ops_for("cpu"))
    for number in range(200):
        request = make_request(number, temperature=0.0, logit_bias={number: 3.0})
        assert sampler.sample(torch.zeros(1, VOCABULARY), [request])[0] == [number]
        request.state = RequestState.FINISHED
    assert len(sampler._biases._biases) < 70


@pytest.mark.parametrize("vocabulary", [VOCABULARY, VOCABULARY + 1])
def test_logprobs_are_those_of_the_unmodified_logits(vocabulary: int) -> None:
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(0, 3, (4, vocabulary)).astype(np.float32))
    requests = [
        make_request(1, temperature=0.0, logprobs=0),
        make_request(2),
        make_request(3, [4, 5], seed=1, logprobs=20, top_k=3, repetition_penalty=2.0, temperature=0.2),
        make_request(4, seed=3, logprobs=2, min_p=0.5),
    ]
    tokens, logprobs = Sampler([EOS], vocabulary, ops_for("cpu")).sample(logits.clone(), requests)
    expected = logits.log_softmax(-1)
    assert logprobs[1] is None
    for row, count in ((0, 0), (2, 20), (3, 2)):
        entry = logprobs[row]
        assert entry is not None
        assert entry.token_id == tokens[row]
        assert entry.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-6)
        values, ids = expected[row].topk(count)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-6)


def test_extreme_options_still_give_a_token() -> None:
    logits = torch.zeros(6, VOCABULARY)
    logits[:, 1] = 1e30
    logits[:, 3] = -torch.inf
    options: list[dict[str, Any]] = [
        {"temperature": 1e-300},
        {"temperature": 100.0},
        {"temperature": 1e-5},
        {"top_p": 5e-324},
        {"min_p": 1.0, "top_p": 0.1},
        {"repetition_penalty": 1e-300, "temperature": 0.0},
    ]
    requests = [make_request(n, seed=n, **option) for n, option in enumerate(options)]
    assert Sampler([EOS], VOCABULARY, ops_for("cpu")).sample(logits, requests)[0][:5] == [1] * 5
