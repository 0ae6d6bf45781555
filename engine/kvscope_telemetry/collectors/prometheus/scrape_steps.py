"""Turns the scrapes of one engine into one reading per second.

Between two scrapes, counters grow evenly, as in Prometheus' `rate`, and gauges keep the value of the earlier scrape.
Otherwise all tokens of a scrape interval would be in one second. A time without scrapes is a gap: nothing is known
about its seconds. Uses no clock and no sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Final

from kvscope_telemetry.collectors.readings import EngineReading

SECOND_NS: Final = 1_000_000_000
USUAL_INTERVAL_NS: Final = 60 * SECOND_NS
"""Assumed scrape interval until three scrapes are known: Prometheus' default."""
GAP_INTERVALS: Final = 2.5
"""Number of scrape intervals without a scrape after which it is a gap. A single scrape may fail or be late."""
_COUNTERS: Final = (
    "prompt_tokens",
    "cached_tokens",
    "generation_tokens",
    "preemptions",
    "draft_tokens",
    "accepted_tokens",
    "finished",
    "aborted",
)


@dataclass(frozen=True, slots=True)
class ScrapeStep:
    time_ns: int
    """Nanoseconds since 1970."""
    reading: EngineReading
    gap_ns: int = 0
    """Length of the gap that ends with this scrape; 0 if there is none."""


class ScrapeSteps:
    """Readings of one engine, in the order of its scrapes."""

    def __init__(self) -> None:
        self.last_ns = 0
        """Time of the newest scrape; 0 before the first."""
        self._last: EngineReading | None = None
        self._intervals_ns: deque[int] = deque(maxlen=20)

    @property
    def interval_ns(self) -> int:
        """Usual time between two scrapes."""
        if len(self._intervals_ns) < 2:
            return USUAL_INTERVAL_NS
        # One gap among few intervals would raise their median.
        return round(median(self._intervals_ns) if len(self._intervals_ns) >= 5 else min(self._intervals_ns))

    def learn_interval(self, times_ns: list[int]) -> None:
        """Set the scrape interval from the times of scrapes that follow each other, oldest first."""
        self._intervals_ns.extend(later - earlier for earlier, later in pairwise(times_ns))

    def add(self, time_ns: int, reading: EngineReading) -> Iterator[ScrapeStep]:
        """Yield the steps up to this scrape. A scrape that is not newer than the last one yields none."""
        before, before_ns = self._last, self.last_ns
        passed_ns = time_ns - before_ns
        if before is not None and passed_ns <= 0:
            return
        self._last, self.last_ns = reading, time_ns
        if before is None:
            yield ScrapeStep(time_ns, reading)
            return
        is_gap = passed_ns > GAP_INTERVALS * self.interval_ns
        if is_gap:
            yield ScrapeStep(time_ns, reading, passed_ns)
            return
        grows = not reading.is_restart_of(before)
        for second_ns in range(before_ns + SECOND_NS, time_ns - SECOND_NS // 2, SECOND_NS):
            share = (second_ns - before_ns) / passed_ns
            yield ScrapeStep(second_ns, _between(before, reading, share) if grows else before)
        yield ScrapeStep(time_ns, reading)


def _between(before: EngineReading, after: EngineReading, share: float) -> EngineReading:
    counters: dict[str, int] = {}
    for name in _COUNTERS:
        then, now = getattr(before, name), getattr(after, name)
        if then is not None and now is not None:
            counters[name] = then + int(max(now - then, 0) * share)
    return replace(before, **counters)  # type: ignore[arg-type]
