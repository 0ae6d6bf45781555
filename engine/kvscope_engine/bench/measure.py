"""Compares contenders in interleaved rounds: rates by wall clock and by CPU time, medians, and ratios within a
round.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from kvscope_engine.bench.workloads import BenchWorkload

Sample = TypeVar("Sample")


class Contender(Protocol):
    """Engine or library that can run a workload to completion."""

    name: str

    def run(self, workload: BenchWorkload) -> None:
        """Generate exactly the number of tokens that the workload asks for."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens generated per second, by the process's CPU time and by wall clock."""

    per_cpu_second: float
    per_second: float


def interleaved_samples(
    samplers: Mapping[str, Callable[[], Sample]],
    rounds: int,
    show_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, list[Sample]]:
    """Return the samples of each contender, one per round. Within a round, contenders run one after the other."""
    samples: dict[str, list[Sample]] = {name: [] for name in samplers}
    for number in range(rounds):
        for name, take_sample in samplers.items():
            show_progress(f"round {number + 1} of {rounds}, {name}")
            samples[name].append(take_sample())
    return samples


def rates(
    contenders: Sequence[Contender],
    workload: BenchWorkload,
    repeats: int,
    show_progress: Callable[[str], None],
) -> dict[str, list[Rate]]:
    """Return the rate of each contender in each round, measured after one warm-up run per contender.

    Within a round, contenders run one after another.
    """
    for contender in contenders:
        show_progress(f"{workload.name}: {contender.name} warms up")
        contender.run(shortened(workload))
    samplers = {
        each.name: partial(timed, partial(each.run, workload), workload.num_output_tokens) for each in contenders
    }
    return interleaved_samples(samplers, repeats, with_prefix(workload.name, show_progress))


def median_rate(rounds: Sequence[Rate]) -> Rate:
    return Rate(
        statistics.median(rate.per_cpu_second for rate in rounds),
        statistics.median(rate.per_second for rate in rounds),
    )


def median_ratio(ours: Sequence[Rate], theirs: Sequence[Rate]) -> float:
    """Return the median over the rounds of the ratio between the tokens per CPU-second of `ours` and `theirs`."""
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(a.per_cpu_second / b.per_cpu_second for a, b in pairs)


def timed(run: Callable[[], None], num_tokens: int) -> Rate:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Rate(num_tokens / cpu, num_tokens / wall)


def shortened(workload: BenchWorkload) -> BenchWorkload:
    """Return a warm-up workload with the same prompts and at most four output tokens each."""
    return replace(workload, output_tokens=tuple(min(4, n) for n in workload.output_tokens))


def progress_printer(is_quiet: bool) -> Callable[[str], None]:
    """Return a function that prints progress on one line of the terminal.

    The function does nothing if `is_quiet` or without a terminal.
    """
    if is_quiet or not sys.stderr.isatty():
        return lambda line: None
    return lambda line: print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def with_prefix(name: str, show_progress: Callable[[str], None]) -> Callable[[str], None]:
    return lambda line: show_progress(f"{name}: {line}")
