"""Many requests on a pool that is too small: random runs, checked step by step against a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.messages.request_state import RequestState

Make = Callable[..., Any]  # fixture of tests/engine/conftest.py


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """Return a prompt of one of a few families, so that many share a prefix."""
    family = rng.randrange(4)
    return [family] * rng.randrange(longest // 2) + [rng.randrange(50) for _ in range(rng.randrange(1, longest // 2))]


def assert_as_new(one: Any) -> None:
    """Check that no block is held and that, after a cache reset, the pool equals a new one except for last-use
    steps.
    """
    pool = one.pool
    assert pool.num_free + pool.num_cached == pool.num_blocks
    assert (pool.ledger.ref_count == 0).all()
    one.scheduler.check_integrity()
    one.scheduler.reset_prefix_cache(one.now_ns)
    assert pool.num_free == pool.num_blocks
    assert (pool.ledger.state == BlockState.FREE).all()
    assert (pool.ledger.owner == NO_OWNER).all()
    assert not pool.ledger.filled.any()
    assert not pool.ledger.hash.any()
    one.scheduler.check_integrity()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_heavy_preemption_gives_the_right_tokens(drive: Make, expected_completion: Make, prefix_caching: bool) -> None:
    """The pool holds a quarter of the demand: every request ends with the right tokens."""
    rng = random.Random(11)
    prompts = [[rng.randrange(50) for _ in range(rng.randrange(4, 24))] for _ in range(24)]
    demand = sum(-(-(len(prompt) + 20) // 4) for prompt in prompts)
    one = drive(num_blocks=demand // 4, max_num_seqs=24, prefix_caching=prefix_caching)
    requests = [one.submit(prompt, 20) for prompt in prompts]
    one.run()
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_token_ids == expected_completion(prompt, 20)
        assert request.finish_reason == "length"
    totals = one.scheduler.totals
    assert totals.preemptions == sum(request.num_preemptions for request in requests) >= 10
    assert totals.admitted == totals.finished == 24
    assert totals.prompt_tokens >= sum(map(len, prompts)) - totals.cached_tokens
    assert_as_new(one)


def test_block_pool_is_empty_after_hundreds_of_aborted_requests(drive: Make, storm: Callable[[int, int], int]) -> None:
    """Hundreds of requests, most of them aborted at random times."""
    num_submits = storm(600, 2000)
    rng = random.Random(23)
    one = drive(num_blocks=64, block_size=4, max_num_seqs=16, max_num_batched_tokens=64)
    for _ in range(num_submits):
        one.submit(random_prompt(rng, 20), rng.randrange(1, 12))
        unfinished = list(one.scheduler.requests.values())
        if rng.random() < 0.85:
            one.scheduler.abort(rng.choice(unfinished), one.now_ns)
        if rng.random() < 0.15:
            one.step()
    one.run()
    totals = one.scheduler.totals
    assert totals.aborted + totals.finished == num_submits
    assert totals.aborted > 0.5 * num_submits
    assert totals.finished > 0.05 * num_submits
    assert_as_new(one)


@pytest.mark.storm(*({"seed": seed} for seed in range(4, 12)))
@pytest.mark.parametrize("seed", range(12))
def test_random_operations_give_the_right_tokens(drive: Make, expected_completion: Make, seed: int) -> None:
    """Submits, aborts, forks and cache resets between steps, with random sizes; `drive` checks each step."""
    rng = random.Random(seed)
    one = drive(
        num_blocks=rng.randrange(12, 40),
        block_size=rng.choice([1, 2, 4, 7]),
        max_num_seqs=rng.randrange(1, 10),
        max_num_batched_tokens=rng.randrange(1, 40),
        prefix_caching=rng.random() < 0.8,
    )
    requests = []
    for _ in range(200):
        if rng.random() < 0.5:
            prompt = random_prompt(rng, min(16, one.scheduler.max_request_tokens // 2 + 1))
            room = one.scheduler.max_request_tokens - len(prompt)
            if room > 0:
                requests.append(one.submit(prompt, rng.randint(1, min(room, 12)), priority=rng.randrange(3)))
        unfinished = list(one.scheduler.requests.values())
        if unfinished and rng.random() < 0.1:
            requests.append(one.fork(rng.choice(unfinished)))
        if unfinished and rng.random() < 0.1:
            one.scheduler.abort(rng.choice(unfinished), one.now_ns)
        if rng.random() < 0.02:
            one.scheduler.reset_prefix_cache(one.now_ns)
        one.step()
    one.run()
    for request in requests:
        if request.finish_reason == "length":
            assert request.output_token_ids == expected_completion(request.prompt_token_ids, request.max_tokens)
    assert_as_new(one)


def test_large_request_does_not_starve(drive: Make) -> None:
    """Later requests neither keep an earlier large one waiting nor start before it."""
    rng = random.Random(3)
    one = drive(num_blocks=16, block_size=4, max_num_seqs=8)
    for _ in range(4):
        one.submit(random_prompt(rng, 8), 8)
    one.step()
    big = one.submit([7] * 50, 10)
    later = []
    while not big.is_finished:
        later.append(one.submit(random_prompt(rng, 8), 8))
        one.step()
        assert len(later) < 200, "the large request did not end"
        if big.state is RequestState.WAITING:
            assert all(request.state is RequestState.WAITING for request in later)


def test_requests_of_equal_priority_are_admitted_in_arrival_order(drive: Make) -> None:
    rng = random.Random(8)
    one = drive(num_blocks=24, block_size=4, max_num_seqs=6)
    for _ in range(60):
        one.submit(random_prompt(rng, 16), rng.randrange(1, 16))
    one.run()
    admitted = [event.number for event in one.scheduler.changes.drain_events() if event.kind == "admitted"]
    assert admitted == sorted(admitted)
    assert len(admitted) == 60


def test_scheduling_the_same_requests_twice_gives_identical_steps(drive: Make) -> None:
    def history() -> list[object]:
        rng = random.Random(42)
        one = drive(num_blocks=20, block_size=4, max_num_seqs=6)
        for _ in range(30):
            one.submit(random_prompt(rng, 16), rng.randrange(1, 16))
        seen: list[object] = []
        while one.scheduler.requests:
            plan, _ = one.step()
            seen.append(
                [(i.request.number, i.start, i.num_tokens, tuple(i.request.block_table)) for i in plan.scheduled]
            )
        return [*seen, one.scheduler.changes.drain_events(), one.pool.ledger.pack_all()]

    assert history() == history()
