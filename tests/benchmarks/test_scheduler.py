"""The benchmark of the scheduler: the load is steady, its counts are right, and the results are printed."""

from __future__ import annotations

import json

import pytest

from benchmarks import scheduler
from benchmarks.command_line import run_benchmark
from benchmarks.scheduler import SteadyLoad, pool_operations_per_s
from kvscope_engine.policy.kv_cache.block_pool import BlockPool


def test_load_keeps_the_requested_number_of_requests_running() -> None:
    load = SteadyLoad(20)
    cost = load.run(200)
    assert cost.num_steps == 200
    assert 0.95 * 20 <= cost.num_scheduled / 200 <= 20
    assert cost.num_finished == pytest.approx(200 * 20 / 256, rel=0.5)
    assert min(cost.schedule_ns, cost.commit_ns, cost.finish_ns) > 0
    load._scheduler.check_integrity()
    assert load._scheduler.totals.preemptions == 0


def test_counted_block_operations_equal_those_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    load = SteadyLoad(20)
    counts = dict.fromkeys(("allocate", "hit", "record_write", "seal", "release"), 0)
    for name in counts:
        monkeypatch.setattr(BlockPool, name, _counted(getattr(BlockPool, name), name, counts))
    cost = load.run(400)
    assert cost.num_finished > 0
    assert counts["hit"] > 0
    assert cost.block_operations == sum(counts.values()) + cost.num_evicted


@pytest.mark.parametrize("kind", ["evicting", "offloading"])
def test_full_pool_evicts_for_each_allocated_block(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    load = SteadyLoad(20, kind=kind)
    pool = load._pool
    assert (pool.num_free < 20, pool.num_host) == (True, 1000 if kind == "offloading" else 0)
    names = ("allocate", "hit", "record_write", "seal", "release")
    counts = dict.fromkeys(names, 0)
    for name in names:
        monkeypatch.setattr(BlockPool, name, _counted(getattr(BlockPool, name), name, counts))
    cost = load.run(200)
    assert cost.num_evicted >= 0.9 * counts["allocate"]
    assert cost.num_offloaded == (cost.num_evicted if kind == "offloading" else 0)
    assert cost.block_operations == sum(counts.values()) + cost.num_evicted + cost.num_offloaded
    load._scheduler.check_integrity()
    assert load._scheduler.totals.preemptions == 0


def _counted(method, name, counts):  # type: ignore[no-untyped-def]
    def call(pool, blocks, *rest):  # type: ignore[no-untyped-def]
        counts[name] += blocks if name == "allocate" else 1 if name == "seal" else len(blocks)
        return method(pool, blocks, *rest)

    return call


def test_benchmark_of_the_block_pool_alone_returns_operations_per_second() -> None:
    assert pool_operations_per_s(200, 5) > 10_000  # with evictions


def main(words: list[str]) -> int:
    return run_benchmark(scheduler.__doc__, scheduler.add_arguments, scheduler.run, words)


def test_scheduler_benchmark_prints_results_and_refuses_invalid_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "POOL_HISTORIES", 10)
    words = ["--small", "2", "--large", "4", "--repeats", "2"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["large"]["num_blocks"] == 400
    assert report["large_over_small"] > 0
    assert main([*words, "--no-prefix-caching"]) == 0
    assert "ns a scheduled request" in capsys.readouterr().out
    assert main([*words, "--profile"]) == 0
    assert "commit_plan" in capsys.readouterr().out
    assert main([*words, "--pool", "offloading", "--steps", "20", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["pool"] == "offloading"
    assert report["large"]["offloaded_per_scheduled"] > 0
    assert main([*words, "--pool", "evicting"]) == 0
    assert "evicted" in capsys.readouterr().out
    assert main([*words, "--pool", "evicting", "--no-prefix-caching"]) == 2
    assert "pool='evicting' is not accepted" in capsys.readouterr().err
    assert main(["--small", "0"]) == 2
    assert "small=0" in capsys.readouterr().err
