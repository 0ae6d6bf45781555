"""Totals and latencies of the last minute, and what follows from them. Knows no engine; times are given."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

import numpy as np

from kvscope_telemetry.messages.telemetry import Counters
from kvscope_telemetry.summaries.figures import HIT_RATE

WINDOW_NS: Final = 60_000_000_000
MIN_SPAN_NS: Final = 900_000_000
"""A rate over less says little."""
MAX_LATENCIES: Final = 2_048
_EVERY_NS: Final = 1_000_000_000


class _Totals(NamedTuple):
    time_ns: int
    prompt_tokens: int
    cached_tokens: int
    preemptions: int


class Rates:
    """Of one engine. `begin` where it starts anew: totals begin again."""

    def __init__(self) -> None:
        self._totals: deque[_Totals] = deque()
        self._newest: _Totals | None = None
        self._latencies: deque[tuple[int, int]] = deque(maxlen=MAX_LATENCIES)

    def begin(self) -> None:
        """Forget all."""
        self._totals.clear()
        self._latencies.clear()
        self._newest = None

    def count(self, counters: Counters, now_ns: int) -> None:
        """Totals as they are now."""
        self._newest = _Totals(now_ns, counters.prompt_tokens, counters.cached_tokens, counters.preemptions)
        if not self._totals or now_ns - self._totals[-1].time_ns >= _EVERY_NS:
            self._totals.append(self._newest)
        while self._totals and now_ns - self._totals[0].time_ns > WINDOW_NS:
            self._totals.popleft()

    def first_tokens(self, packed: bytes, now_ns: int) -> None:
        """Latencies as a frame has them."""
        if packed:
            self._latencies.extend((now_ns, value) for value in np.frombuffer(packed, "<u8").tolist())

    def hit_rate(self) -> float | None:
        """None where no prompt began."""
        if self._newest is None or not self._totals:
            return None
        newest, oldest = self._newest._asdict(), self._totals[0]._asdict()
        return HIT_RATE.of({name: max(0, newest[name] - oldest[name]) for name in HIT_RATE.names()})

    def preemptions_per_s(self) -> float | None:
        """None until there is a second to speak of."""
        if self._newest is None or not self._totals:
            return None
        span_ns = self._newest.time_ns - self._totals[0].time_ns
        if span_ns < MIN_SPAN_NS:
            return None
        return max(0, self._newest.preemptions - self._totals[0].preemptions) * 1e9 / span_ns

    def first_token_s(self, now_ns: int) -> float | None:
        """The median; None where none came."""
        while self._latencies and now_ns - self._latencies[0][0] > WINDOW_NS:
            self._latencies.popleft()
        if not self._latencies:
            return None
        return float(np.median([value for _, value in self._latencies])) / 1e9
