"""Rates and latencies of one engine over the last minute. Must not depend on an engine; reads no clock: callers pass
times.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

import numpy as np

from kvscope_telemetry.messages.telemetry import Counters
from kvscope_telemetry.summaries.run_figures import HIT_RATE

WINDOW_NS: Final = 60_000_000_000
MIN_SPAN_NS: Final = 900_000_000
"""Minimum time in nanoseconds over which a rate is meaningful."""
MAX_LATENCIES: Final = 2_048
_SAMPLE_INTERVAL_NS: Final = 1_000_000_000


class _Totals(NamedTuple):
    time_ns: int
    prompt_tokens: int
    cached_tokens: int
    preemptions: int


class Rates:
    """Figures of one engine over the last minute. Call `begin` when the engine restarts, because its counters restart
    at 0.
    """

    def __init__(self) -> None:
        self._totals: deque[_Totals] = deque()
        self._newest: _Totals | None = None
        self._latencies: deque[tuple[int, int]] = deque(maxlen=MAX_LATENCIES)

    def begin(self) -> None:
        self._totals.clear()
        self._latencies.clear()
        self._newest = None

    def count(self, counters: Counters, now_ns: int) -> None:
        self._newest = _Totals(now_ns, counters.prompt_tokens, counters.cached_tokens, counters.preemptions)
        if not self._totals or now_ns - self._totals[-1].time_ns >= _SAMPLE_INTERVAL_NS:
            self._totals.append(self._newest)
        while self._totals and now_ns - self._totals[0].time_ns > WINDOW_NS:
            self._totals.popleft()

    def first_tokens(self, packed: bytes, now_ns: int) -> None:
        """Add the times to first token of a telemetry frame, given as packed little-endian u64 in nanoseconds."""
        if packed:
            self._latencies.extend((now_ns, value) for value in np.frombuffer(packed, "<u8").tolist())

    def hit_rate(self) -> float | None:
        """Return the prefix cache hit rate, 0 to 1; None if no prompt was started."""
        if self._newest is None or not self._totals:
            return None
        newest, oldest = self._newest._asdict(), self._totals[0]._asdict()
        return HIT_RATE.of({name: max(0, newest[name] - oldest[name]) for name in HIT_RATE.names()})

    def preemptions_per_s(self) -> float | None:
        if self._newest is None or not self._totals:
            return None
        span_ns = self._newest.time_ns - self._totals[0].time_ns
        if span_ns < MIN_SPAN_NS:
            return None
        return max(0, self._newest.preemptions - self._totals[0].preemptions) * 1e9 / span_ns

    def first_token_s(self, now_ns: int) -> float | None:
        """Return the median time to first token in seconds; None if there were no first tokens."""
        while self._latencies and now_ns - self._latencies[0][0] > WINDOW_NS:
            self._latencies.popleft()
        if not self._latencies:
            return None
        return float(np.median([value for _, value in self._latencies])) / 1e9
