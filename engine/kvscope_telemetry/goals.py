"""Goals for the latencies of requests, as vLLM's `--goodput` names them, and which requests kept or missed them.

Owns the names, how goals are written (`ttft:200 tpot:50`, in milliseconds), and what goodput is: the share of finished
requests that kept every goal. Latencies are those of `latencies`, so that no stop of the engine makes a request miss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.latencies import Moments

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

GOAL_NAMES: Final = {
    "ttft": "time to first token",
    "tpot": "mean time per output token after the first",
    "e2el": "end-to-end latency",
}
Goals = Mapping[str, float]
"""Milliseconds by name, one of `GOAL_NAMES`; what has no goal is not judged."""


def read_goals(texts: Iterable[str], option: str = "--goodput") -> dict[str, float]:
    """Parse `ttft:200`, …; the last value of a name counts. Raises BadInput, which names `option`."""
    return dict(_read_goal(text, option) for text in texts)


def goals_text(goals: Goals) -> str:
    """Format goals as `read_goals` parses them, separated by spaces."""
    return " ".join(f"{name}:{limit_ms:g}" for name, limit_ms in goals.items())


def _read_goal(text: str, option: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    try:
        limit_ms = float(value)
    except ValueError:
        limit_ms = math.nan
    if name not in GOAL_NAMES or not 0 <= limit_ms < math.inf:
        accepted = f"{', '.join(GOAL_NAMES)} with milliseconds, as ttft:200"
        raise BadInput(f"{option} {text!r:.60} is not accepted: {accepted}")
    return name, limit_ms


def took_s(moments: Moments, num_output_tokens: int) -> dict[str, float]:
    """What is judged of one request, in seconds by goal; NaN where it is not known (yet). Who wrote one token or none
    has no time between tokens: it keeps that goal."""
    decode_s = _seconds(moments.decode_ns)
    return {
        "ttft": _seconds(moments.ttft_ns),
        "tpot": decode_s / (num_output_tokens - 1) if num_output_tokens > 1 else 0.0,
        "e2el": _seconds(moments.total_ns),
    }


def _seconds(duration_ns: int | None) -> float:
    return math.nan if duration_ns is None else duration_ns / 1e9


@dataclass(frozen=True, slots=True)
class Judged:
    """Of many finished requests, shape (n,) each. One that is neither has a latency that nobody saw."""

    kept: BoolArray
    missed: BoolArray

    @property
    def goodput(self) -> float | None:
        """The share of requests that kept every goal, 0 to 1, of those that can be judged; None where there are
        none."""
        num_judged = self.num_judged
        return float(np.count_nonzero(self.kept)) / num_judged if num_judged else None

    @property
    def num_judged(self) -> int:
        """Those of which it is known."""
        return int(np.count_nonzero(self.kept | self.missed))


def judge(took: Mapping[str, FloatArray], goals: Goals) -> Judged:
    """By `took_s` of each, in arrays. A miss is a miss whatever is not known beside it."""
    kept, missed = (np.full(len(next(iter(took.values()))), start) for start in (True, False))
    for name, limit_ms in goals.items():
        kept &= took[name] * 1e3 <= limit_ms
        missed |= took[name] * 1e3 > limit_ms
    return Judged(kept, missed)


def missed_words(took: Mapping[str, float], goals: Goals) -> list[str]:
    """`TTFT 2.31 s, goal 200 ms`, for each goal that was missed."""
    return [
        f"{name.upper()} {time_text(took[name])}, goal {limit_ms:g} ms"
        for name, limit_ms in goals.items()
        if took[name] * 1e3 > limit_ms
    ]


def time_text(seconds: float) -> str:
    """`2.31 s`, `52.0 ms`."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"
