"""Defines each latency of a request: its start and end moments on the engine's clock.

Owns the definitions and their texts. All latencies are measured in `RunningTime`, which excludes the time in which the
engine was stopped. If a moment was not observed, because the request ran before telemetry was received, the latency is
unknown and never estimated.
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
    key: str
    """Name of the latency in a `Summary`, in a `Histogram`, and in the names of figures."""
    name: str
    counts: str
    """Start and end of the latency, as text for the user."""


FIRST_TOKEN: Final = LatencyKind("first_token", "Time to first token", "From a request's arrival to its first token")
INTER_TOKEN: Final = LatencyKind("inter_token", "Time between tokens", "Between two tokens of the same request")
QUEUED: Final = LatencyKind("queued", "Queue time", "From a request's arrival until it first ran")
LATENCIES: Final = (FIRST_TOKEN, INTER_TOKEN, QUEUED)


def running_s(from_ns: IntArray, until_ns: IntArray, running: RunningTime) -> FloatArray:
    """Return the running time between two moments of many requests, in seconds. Shape (n,) each.

    NaN if a moment is unknown (negative); 0 if clocks of different machines put the moments in the wrong order.
    """
    is_known = (from_ns >= 0) & (until_ns >= 0)
    seconds: FloatArray = np.where(is_known, running.running_between(from_ns, until_ns) / 1e9, np.nan)
    return seconds


@dataclass(slots=True)
class Moments:
    """Moments of one request on its engine's clock; None if not reached yet or not observed."""

    arrival_ns: int
    started_ns: int | None = None
    first_token_ns: int | None = None
    ended_ns: int | None = None
    running: RunningTime = field(default_factory=RunningTime, compare=False)
    """Converts spans of engine time to running time, without the engine's stops."""

    @property
    def queue_ns(self) -> int | None:
        return self._between(self.arrival_ns, self.started_ns)

    @property
    def ttft_ns(self) -> int | None:
        return self._between(self.arrival_ns, self.first_token_ns)

    @property
    def prefill_ns(self) -> int | None:
        return self._between(self.started_ns, self.first_token_ns)

    @property
    def decode_ns(self) -> int | None:
        """Running time from the first token to the end of the request. The request ends with its last token,
        unless it is aborted.
        """
        return self._between(self.first_token_ns, self.ended_ns)

    @property
    def inference_ns(self) -> int | None:
        return self._between(self.started_ns, self.ended_ns)

    @property
    def total_ns(self) -> int | None:
        return self._between(self.arrival_ns, self.ended_ns)

    def _between(self, from_ns: int | None, until_ns: int | None) -> int | None:
        return None if from_ns is None or until_ns is None else self.running.running_ns(from_ns, until_ns)


def tokens_per_s(
    num_output_tokens: IntArray, first_token_ns: IntArray, until_ns: IntArray, running: RunningTime
) -> FloatArray:
    """Return the decode speed of requests: tokens after the first, divided by the running time from the first token to
    the last. NaN with fewer than two tokens. Shape (n,) each.
    """
    decode_s = running_s(first_token_ns, until_ns, running)
    is_known = (decode_s > 0) & (num_output_tokens > 1)  # NaN is not above 0
    return np.where(is_known, (num_output_tokens - 1) / np.where(is_known, decode_s, 1.0), np.nan)
