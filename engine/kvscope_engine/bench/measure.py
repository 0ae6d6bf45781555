"""Measure contenders side by side: interleaved rounds, medians, wall and CPU seconds."""

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
    """Something that runs a workload to its end."""

    name: str

    def run(self, workload: BenchWorkload) -> None:
        """Generate exactly the tokens that the workload asks for."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens generated a second: by the process's CPU time and by the clock on the wall."""

    per_cpu_second: float
    per_second: float


def in_turns(
    samplers: Mapping[str, Callable[[], Sample]],
    rounds: int,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, list[Sample]]:
    """Return each contender's sample of each round; one contender after the other within a round."""
    found: dict[str, list[Sample]] = {name: [] for name in samplers}
    for number in range(rounds):
        for name, sample in samplers.items():
            tell(f"round {number + 1} of {rounds}, {name}")
            found[name].append(sample())
    return found


def rates(
    contenders: Sequence[Contender],
    workload: BenchWorkload,
    repeats: int,
    tell: Callable[[str], None],
) -> dict[str, list[Rate]]:
    """Each contender's rate in each round; one after the other within a round, after a warm-up each."""
    for contender in contenders:
        tell(f"{workload.name}: {contender.name} warms up")
        contender.run(shortened(workload))
    samplers = {
        each.name: partial(timed, partial(each.run, workload), workload.num_output_tokens) for each in contenders
    }
    return in_turns(samplers, repeats, telling_of(workload.name, tell))


def median_rate(rounds: Sequence[Rate]) -> Rate:
    """The median of each number."""
    return Rate(
        statistics.median(rate.per_cpu_second for rate in rounds),
        statistics.median(rate.per_second for rate in rounds),
    )


def median_ratio(ours: Sequence[Rate], theirs: Sequence[Rate]) -> float:
    """Median over the rounds of our tokens a CPU-second over theirs in the same round."""
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(a.per_cpu_second / b.per_cpu_second for a, b in pairs)


def timed(run: Callable[[], None], num_tokens: int) -> Rate:
    """The rate of a run that generates so many tokens."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Rate(num_tokens / cpu, num_tokens / wall)


def shortened(workload: BenchWorkload) -> BenchWorkload:
    """To warm up with: the same prompts, four tokens after each at most."""
    return replace(workload, output_tokens=tuple(min(4, n) for n in workload.output_tokens))


def teller(is_quiet: bool) -> Callable[[str], None]:
    """Tells what is being measured, on a terminal alone, each line in the place of the last."""
    if is_quiet or not sys.stderr.isatty():
        return lambda line: None
    return lambda line: print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def telling_of(name: str, tell: Callable[[str], None]) -> Callable[[str], None]:
    """Tells the same of one of several."""
    return lambda line: tell(f"{name}: {line}")
