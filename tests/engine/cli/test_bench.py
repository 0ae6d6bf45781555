"""`bench NAME` finds its module and passes it the remaining options."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope_engine.cli import bench

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def benchmark_calls(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """Calls of a fake benchmark `decode`, which returns 3."""
    calls: list[argparse.Namespace] = []

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--repeats", type=int, default=5)

    def run(args: argparse.Namespace) -> int:
        calls.append(args)
        return 3

    module: Any = SimpleNamespace(__doc__="Measures.", add_arguments=add_arguments, run=run)
    monkeypatch.setattr(bench, "benchmark_names", lambda: ["decode"])
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    return calls


def test_benchmark_gets_its_options_and_sets_the_exit_code(run: Run, benchmark_calls: list[argparse.Namespace]) -> None:
    assert run("bench", "decode", "--repeats", "2", "--json") == (3, "", "")
    assert (benchmark_calls[0].repeats, benchmark_calls[0].json) == (2, True)
    assert run("bench", "decode")[0] == 3
    assert (benchmark_calls[1].repeats, benchmark_calls[1].json) == (5, False)


def test_unknown_option_of_a_benchmark_is_a_usage_error(run: Run, benchmark_calls: list[argparse.Namespace]) -> None:
    code, _, err = run("bench", "decode", "--repeat-s", "2")
    assert code == 2
    assert "--repeat-s" in err
    assert not benchmark_calls


@pytest.mark.parametrize("name", ["measure", "../decode", "", "_private", "os"])
def test_unknown_benchmark_is_refused_with_the_known_ones(run: Run, name: str) -> None:
    code, _, err = run("bench", name)
    assert code == 2
    assert f"bench {name!r} is not known: one of " in err


def test_every_offered_benchmark_exists() -> None:
    assert set(bench.benchmark_names()) <= set(bench.BENCHMARKS)
