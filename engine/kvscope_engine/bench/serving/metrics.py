"""What the timelines of a run say, by the names and meanings of vLLM's benchmark client. Pure.

Failed requests are counted by what went wrong, and are in no other figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np

from kvscope_engine.bench.serving.timeline import Timeline

METRICS: Final = {
    "ttft": "first token",
    "tpot": "time per output token",
    "itl": "between tokens",
    "e2el": "end to end",
}
"""Names, and what a person calls them."""
_MS: Final = 1000.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one metric, in milliseconds."""

    mean_ms: float
    median_ms: float
    percentiles_ms: dict[float, float]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Of one run. A spread is None where nothing was measured."""

    duration_s: float
    completed: int
    failures: dict[str, int]
    """What went wrong, and how often."""
    total_input_tokens: int
    total_output_tokens: int
    good: int | None
    """Requests that kept every limit; None where none was asked for."""
    max_concurrent_requests: int
    spreads: dict[str, Spread | None]

    @property
    def failed(self) -> int:
        """Requests without a whole answer."""
        return sum(self.failures.values())

    @property
    def request_throughput(self) -> float:
        """Whole answers a second."""
        return self.completed / self.duration_s

    @property
    def output_throughput(self) -> float:
        """Tokens of answers a second."""
        return self.total_output_tokens / self.duration_s

    @property
    def total_token_throughput(self) -> float:
        """Tokens of prompts and answers a second."""
        return (self.total_input_tokens + self.total_output_tokens) / self.duration_s

    def as_json(self) -> dict[str, Any]:
        """By vLLM's names."""
        told: dict[str, Any] = {
            "duration": self.duration_s,
            "completed": self.completed,
            "failed": self.failed,
            "failures": self.failures,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "request_throughput": self.request_throughput,
            "request_goodput": None if self.good is None else self.good / self.duration_s,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "max_concurrent_requests": self.max_concurrent_requests,
        }
        for name, spread in self.spreads.items():
            told[f"mean_{name}_ms"] = spread and spread.mean_ms
            told[f"median_{name}_ms"] = spread and spread.median_ms
            for percentile, value in (spread.percentiles_ms if spread else {}).items():
                told[f"p{percentile:g}_{name}_ms"] = value
        return told


def metrics(
    timelines: Sequence[Timeline],
    duration_s: float,
    *,
    percentiles: Sequence[float] = (90.0, 99.0),
    goodput_ms: Mapping[str, float] | None = None,
) -> Metrics:
    """Of a run that took `duration_s`; `goodput_ms` are limits by the metric's name."""
    whole = [timeline for timeline in timelines if not timeline.error]
    tpots = [timeline.tpot_s for timeline in whole]
    seconds = {
        "ttft": [timeline.ttft_s for timeline in whole],
        "tpot": [tpot for tpot in tpots if tpot is not None],
        "itl": [gap for timeline in whole for gap in timeline.itls_s],
        "e2el": [timeline.e2el_s for timeline in whole],
    }
    return Metrics(
        duration_s=duration_s,
        completed=len(whole),
        failures=dict(Counter(timeline.error for timeline in timelines if timeline.error).most_common()),
        total_input_tokens=sum(timeline.num_prompt_tokens for timeline in whole),
        total_output_tokens=sum(timeline.num_output_tokens for timeline in whole),
        good=sum(_is_good(timeline, goodput_ms) for timeline in whole) if goodput_ms else None,
        max_concurrent_requests=_most_at_once(whole),
        spreads={name: _spread(values, percentiles) for name, values in seconds.items()},
    )


def _spread(seconds: Sequence[float], percentiles: Sequence[float]) -> Spread | None:
    if not seconds:
        return None
    ms = np.asarray(seconds) * _MS
    found = {percentile: float(np.percentile(ms, percentile)) for percentile in percentiles}
    return Spread(float(ms.mean()), float(np.median(ms)), found)


def _is_good(timeline: Timeline, limits_ms: Mapping[str, float]) -> bool:
    found = {"ttft": timeline.ttft_s, "tpot": timeline.tpot_s or 0.0, "e2el": timeline.e2el_s}
    return all(found[name] * _MS <= limit for name, limit in limits_ms.items())


def _most_at_once(whole: Sequence[Timeline]) -> int:
    """An end comes before a beginning at the same time."""
    changes = sorted([(one.start_s, 1) for one in whole] + [(one.end_s, -1) for one in whole])
    return max(accumulate((change for _, change in changes), initial=0))
