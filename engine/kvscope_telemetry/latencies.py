"""Defines each latency of a request: from which of its moments to which, on its engine's clock.

Owns the definitions and the words for them. All are measured in `RunningTime`: the time between two moments without the
time in which the engine stood still. A moment that nobody saw, because the request ran before anybody listened, makes a
latency unknown, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.running_time import RunningTime

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LatencyKind:
    """A kind of latency, reported as percentiles over many requests."""

    key: str
    """Of a `Summary`, of a `Histogram`, and in names of figures."""
    name: str
    counts: str
    """From when to when, as a person reads it."""


FIRST_TOKEN: Final = LatencyKind("first_token", "Time to first token", "From a request's arrival to its first token")
INTER_TOKEN: Final = LatencyKind("inter_token", "Time between tokens", "Between two tokens of the same request")
QUEUED: Final = LatencyKind("queued", "Queue time", "From a request's arrival until it first ran")
LATENCIES: Final = (FIRST_TOKEN, INTER_TOKEN, QUEUED)


def running_s(from_ns: IntArray, until_ns: IntArray, running: RunningTime) -> FloatArray:
    """Running time between two moments of many requests, in seconds; NaN where one of the moments is not known, which
    is below 0, and 0 where another machine's clock puts them in the other order."""
    known = (from_ns >= 0) & (until_ns >= 0)
    seconds: FloatArray = np.where(known, running.running_between(from_ns, until_ns) / 1e9, np.nan)
    return seconds


@dataclass(slots=True)
class Moments:
    """Of one request, by its engine's clock. None: not yet, or nobody saw it."""

    arrival_ns: int
    started_ns: int | None = None
    """When it first ran."""
    first_token_ns: int | None = None
    ended_ns: int | None = None
    running: RunningTime = field(default_factory=RunningTime, compare=False)
    """Of the engine: what it stood still is no part of any of these."""

    @property
    def queue_ns(self) -> int | None:
        """From its arrival until it first ran."""
        return self._between(self.arrival_ns, self.started_ns)

    @property
    def ttft_ns(self) -> int | None:
        """From its arrival to its first token."""
        return self._between(self.arrival_ns, self.first_token_ns)

    @property
    def prefill_ns(self) -> int | None:
        """From when it first ran to its first token."""
        return self._between(self.started_ns, self.first_token_ns)

    @property
    def decode_ns(self) -> int | None:
        """From its first token to its end, which is its last token's where it ended by itself."""
        return self._between(self.first_token_ns, self.ended_ns)

    @property
    def inference_ns(self) -> int | None:
        """From when it first ran to its end."""
        return self._between(self.started_ns, self.ended_ns)

    @property
    def total_ns(self) -> int | None:
        """From its arrival to its end."""
        return self._between(self.arrival_ns, self.ended_ns)

    def _between(self, from_ns: int | None, until_ns: int | None) -> int | None:
        return None if from_ns is None or until_ns is None else self.running.running_ns(from_ns, until_ns)


def tokens_per_s(
    num_output_tokens: IntArray, first_token_ns: IntArray, until_ns: IntArray, running: RunningTime
) -> FloatArray:
    """A request's speed: the tokens after its first, over the running time from that one to its last; NaN before there
    are two. Shape (n,) each."""
    took_s = running_s(first_token_ns, until_ns, running)
    known = (took_s > 0) & (num_output_tokens > 1)  # NaN is not above 0
    return np.where(known, (num_output_tokens - 1) / np.where(known, took_s, 1.0), np.nan)
