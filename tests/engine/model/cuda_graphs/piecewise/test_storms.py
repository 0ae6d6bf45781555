"""Random load on engines whose steps with prefills run in graphs: nothing is lost and the tokens are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.test_speculation import make_drafting_engine
from tests.engine.test_step_loop import RandomLoad, close_to, generated, jobs_of, numbers

from kvscope_engine import Engine
from kvscope_telemetry.messages.commands import Submit

Make = Callable[..., Engine]
Said = list[tuple[list[int], str | None, Any]]


@pytest.fixture(scope="module")
def jobs() -> list[Submit]:
    return jobs_of(14)


@pytest.fixture(scope="module")
def expected(make_small: Make, jobs: list[Submit]) -> Said:
    """Results without graphs and with enough memory for all requests."""
    with make_small(num_gpu_blocks_override=2048, max_num_seqs=32) as engine:
        return generated(engine, jobs)


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 19, "max_num_seqs": 6},
        {"num_gpu_blocks_override": 24, "preemption": "swap", "host_kv_memory_bytes": 1 << 20},
        {"enable_prefix_caching": False, "max_num_seqs": 3},
    ],
    ids=["chunks, too few blocks", "swaps", "no prefix cache"],
)
def test_graphs_give_the_same_tokens_with_async_scheduling(
    make_engine: Make, jobs: list[Submit], expected: Said, options: dict[str, Any], cpu_graphs: Any
) -> None:
    """Greedy and sampled requests."""
    engine = make_engine(async_scheduling=True, **options)
    for _ in range(2):
        assert numbers(generated(engine, jobs)) == close_to(expected)
    assert cpu_graphs.replays > 0
    assert engine.notes == ()


def test_speculative_tokens_are_verified_in_graphs(
    make_engine: Make, jobs: list[Submit], expected: Said, cpu_graphs: Any
) -> None:
    """Every row of a verification step is sampled."""
    engine = make_drafting_engine(make_engine, jobs, expected)
    assert numbers(generated(engine, jobs)) == close_to(expected)
    assert engine.components.scheduler.totals.accepted_tokens > 0
    assert cpu_graphs.replays > 0


def test_random_aborts_and_preemptions_lose_nothing(
    make_engine: Make, jobs: list[Submit], expected: Said, cpu_graphs: Any, storm: Callable[[int, int], int]
) -> None:
    """Steps are also scheduled ahead at random."""
    run = RandomLoad(make_engine, jobs, 0)
    run.run(storm(80, 300))
    completions = iter(expected)
    wanted = [[next(completions) for _ in range(job.sampling.n)] for job in jobs]
    for (name, index), reason in run.reasons.items():
        tokens, end, _ = wanted[run.job_of[name]][index]
        said = run.said.get((name, index), [])
        assert said == tokens[: len(said)]
        assert reason == "abort" or (len(said), reason) == (len(tokens), end)
    assert set(run.reasons) == {(name, i) for name, job in run.job_of.items() for i in range(jobs[job].sampling.n)}
    assert cpu_graphs.replays > 0
    assert not any(run.engine.snapshot().blocks.ref_count)
