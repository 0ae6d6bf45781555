"""Time spent, by two clocks: wall time, and the process's CPU time, which other processes on the machine do
not affect.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Rounds = Mapping[str, Sequence["Spent"]]
"""What each way took in each round; the same rounds for all."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds. A drive or a GPU that is waited for counts on the wall alone."""

    wall_s: float
    cpu_s: float


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    @property
    def spent(self) -> Spent:
        """Up to now."""
        return Spent(time.perf_counter() - self._wall, time.process_time() - self._cpu)


def summary(rounds: Rounds, against: str) -> dict[str, dict[str, float]]:
    """Medians of each way, and of how many times longer `against` took in the same round."""
    return {name: _medians(found, rounds[against]) for name, found in rounds.items()}


def _medians(found: Sequence[Spent], against: Sequence[Spent]) -> dict[str, float]:
    pairs = list(zip(found, against, strict=True))
    return {
        "wall_s": statistics.median(one.wall_s for one in found),
        "cpu_s": statistics.median(one.cpu_s for one in found),
        "wall_ratio": statistics.median(other.wall_s / one.wall_s for one, other in pairs),
        "cpu_ratio": statistics.median(other.cpu_s / one.cpu_s for one, other in pairs),
    }
