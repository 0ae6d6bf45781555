"""Workloads generated from a seed: means, limits, arrivals, shared prefixes and determinism."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import mean, pstdev

import pytest

from kvscope_engine.simulator.workloads.generators import GENERATORS, GeneratorOptions, generate
from kvscope_engine.simulator.workloads.workload import Workload
from kvscope_telemetry.errors import BadInput

MANY = GeneratorOptions(num_requests=20_000)


def gaps_s(workload: Workload) -> list[float]:
    times = [request.arrival_ns / 1e9 for request in workload.requests]
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize(("name", "prompt", "output"), [("sharegpt", 161.31, 337.99), ("alpaca", 19.31, 58.45)])
def test_mean_lengths_of_generated_workloads_equal_the_published_ones(name: str, prompt: float, output: float) -> None:
    workload = generate(name, MANY, 1 << 20)
    assert workload.mean_prompt_tokens == pytest.approx(prompt, rel=0.05)
    assert workload.mean_output_tokens == pytest.approx(output, rel=0.05)


def test_mixed_workload_has_the_average_length_of_sharegpt_and_alpaca() -> None:
    assert generate("mixed", MANY, 1 << 20).mean_output_tokens == pytest.approx((337.99 + 58.45) / 2, rel=0.05)


@pytest.mark.parametrize("name", GENERATORS)
def test_no_request_exceeds_the_maximum_length(name: str) -> None:
    workload = generate(name, replace(MANY, num_requests=3000, shared_prefix_tokens=40), 64)
    assert workload.longest == 64
    assert min(request.num_prompt_tokens for request in workload.requests) >= 41
    assert min(request.num_output_tokens for request in workload.requests) == 1


def test_generated_workload_uses_shared_prefixes_with_decreasing_frequency() -> None:
    options = replace(MANY, num_requests=11_000, shared_prefix_tokens=40, num_prefixes=3)
    workload = generate("alpaca", options, 512)
    used = Counter(request.text_ids for request in workload.requests)
    assert set(used) == {(0,), (1,), (2,)}
    assert [used[number,] for number in range(3)] == pytest.approx([6000, 3000, 2000], rel=0.05)
    alone = generate("alpaca", replace(options, num_prefixes=1), 512)
    assert [replace(request, text_ids=(0,)) for request in workload.requests] == list(alone.requests)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_prefixes": 0, "shared_prefix_tokens": 9}, "num_prefixes=0 is not accepted"),
        ({"num_prefixes": 2}, "num_prefixes=2 is not accepted without a length"),
    ],
)
def test_invalid_prefix_options_are_refused(options: dict[str, int], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        replace(MANY, **options)


@pytest.mark.parametrize(("arrivals", "spread"), [("poisson", 1.0), ("bursty", 2.0)])
def test_generated_arrival_gaps_have_the_mean_and_spread_of_their_process(arrivals: str, spread: float) -> None:
    gaps = gaps_s(generate("alpaca", replace(MANY, rate=4, arrivals=arrivals), 2048))
    assert mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("arrivals", ["poisson", "bursty"])
def test_without_a_rate_all_requests_arrive_at_once(arrivals: str) -> None:
    workload = generate("alpaca", GeneratorOptions(num_requests=10, arrivals=arrivals), 2048)
    assert {request.arrival_ns for request in workload.requests} == {0}


def test_seed_determines_the_workload_and_the_rate_does_not_change_lengths() -> None:
    options = GeneratorOptions(num_requests=50, rate=2, seed=3)
    one, other = generate("sharegpt", options, 2048), generate("sharegpt", replace(options, seed=4), 2048)
    assert one == generate("sharegpt", options, 2048) != other
    faster = generate("sharegpt", replace(options, rate=7), 2048)
    assert [request.num_output_tokens for request in faster.requests] == [
        request.num_output_tokens for request in one.requests
    ]


def test_shared_prefix_has_equal_tokens() -> None:
    workload = generate("alpaca", GeneratorOptions(num_requests=2, shared_prefix_tokens=5), 2048)
    first, second = (workload.prompt_token_ids(request, -number) for number, request in enumerate(workload.requests, 1))
    assert first[:5] == second[:5] == [0] * 5
    assert set(first[5:]) == {-1}
    assert set(second[5:]) == {-2}
    assert [len(first), len(second)] == [request.num_prompt_tokens for request in workload.requests]


@pytest.mark.parametrize(
    "options",
    [
        {"num_requests": 0},
        {"num_requests": 10**12},
        {"rate": 0.0},
        {"rate": -1.0},
        {"rate": float("nan")},
        {"arrivals": "never"},
        {"shared_prefix_tokens": -1},
    ],
)
def test_invalid_workload_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(BadInput, match="is not accepted"):
        GeneratorOptions(**options)  # type: ignore[arg-type]


def test_shared_prefix_leaves_room_for_a_prompt_and_output() -> None:
    assert generate("alpaca", GeneratorOptions(shared_prefix_tokens=62), 64).longest == 64
    with pytest.raises(BadInput, match="a shared prefix of 63 tokens is not accepted: at most 62"):
        generate("alpaca", GeneratorOptions(shared_prefix_tokens=63), 64)
