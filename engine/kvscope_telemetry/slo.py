"""Latency goals for requests, named as in vLLM's `--goodput`, and which requests met or missed them.

Defines the names of goals, their syntax (`ttft:200 tpot:50`, in milliseconds), and goodput: the share of finished
requests that met every goal. Latencies are those of `latencies`, so no request misses its goal because the engine was
stopped.
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
"""Maps a name from `GOAL_NAMES` to a limit in milliseconds. Latencies without a goal are not judged."""


def read_goals(texts: Iterable[str], option: str = "--goodput") -> dict[str, float]:
    """Parse texts such as `ttft:200`. If a name is repeated, its last value applies. Raises BadInput, which
    names `option`.
    """
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


def latencies_by_goal(moments: Moments, num_output_tokens: int) -> dict[str, float]:
    """Return the latencies of one request in seconds by goal name; NaN if not known yet.

    A request with at most one output token has a `tpot` of 0, so that it meets that goal.
    """
    decode_s = _seconds(moments.decode_ns)
    return {
        "ttft": _seconds(moments.ttft_ns),
        "tpot": decode_s / (num_output_tokens - 1) if num_output_tokens > 1 else 0.0,
        "e2el": _seconds(moments.total_ns),
    }


def _seconds(duration_ns: int | None) -> float:
    return math.nan if duration_ns is None else duration_ns / 1e9


@dataclass(frozen=True, slots=True)
class GoalResults:
    """Whether each of n finished requests met all of its goals (`met`) or missed one (`missed`), shape (n,)
    each. Both are False if no goal is known to be missed, but a latency of the request is unknown.
    """

    met: BoolArray
    missed: BoolArray

    @property
    def goodput(self) -> float | None:
        """Share of the judged requests that met every goal, 0 to 1; None if no request was judged."""
        num_judged = self.num_judged
        return float(np.count_nonzero(self.met)) / num_judged if num_judged else None

    @property
    def num_judged(self) -> int:
        return int(np.count_nonzero(self.met | self.missed))


def judge(took: Mapping[str, FloatArray], goals: Goals) -> GoalResults:
    """Compare latencies with goals. `took` has the values of `latencies_by_goal` for many requests, as arrays.

    A request that misses a goal counts as missed even if another of its latencies is unknown.
    """
    is_met, is_missed = (np.full(len(next(iter(took.values()))), start) for start in (True, False))
    for name, limit_ms in goals.items():
        is_met &= took[name] * 1e3 <= limit_ms
        is_missed |= took[name] * 1e3 > limit_ms
    return GoalResults(is_met, is_missed)


def missed_goals_text(took: Mapping[str, float], goals: Goals) -> list[str]:
    """Return a text for each missed goal, such as "TTFT 2.31 s, goal 200 ms"."""
    return [
        f"{name.upper()} {time_text(took[name])}, goal {limit_ms:g} ms"
        for name, limit_ms in goals.items()
        if took[name] * 1e3 > limit_ms
    ]


def time_text(seconds: float) -> str:
    """Format a duration such as "2.31 s" or "52.0 ms"."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"
