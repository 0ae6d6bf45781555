"""The benchmark of rejected alternatives runs with small sizes, case by case."""

from __future__ import annotations

import pytest

from benchmarks import alternatives
from benchmarks.alternatives import CASES
from benchmarks.command_line import run_benchmark


def run(*arguments: str) -> int:
    return run_benchmark(alternatives.__doc__, alternatives.add_arguments, alternatives.run, arguments)


@pytest.mark.parametrize("case", CASES)
def test_benchmark_of_each_rejected_alternative_prints_a_result(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(case, "--scale", "0.01") == 0
    assert capsys.readouterr().out.startswith(f"{case.replace('-', ' ')}: ")


def test_unknown_case_of_the_alternatives_benchmark_is_refused_with_the_known_cases(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("letters") != 0
    assert "there is no case letters; there are ledger, packing" in capsys.readouterr().err
