"""What each alarm looks at in a second, and what it must remember of those before to do so.

A measure is NaN where it is not known. Each is of one engine start.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from kvscope_telemetry.alarms.forecast import WINDOW_S, seconds_left
from kvscope_telemetry.alarms.rules import FRAMES_LOST, HOT, KV_USAGE, PREEMPTIONS, RUN_OUT, STUCK, WAITING, Rule
from kvscope_telemetry.alarms.seconds import Second
from kvscope_telemetry.summaries.figures import USAGE
from kvscope_telemetry.summaries.summary import SECOND_NS

Measure = Callable[[Second], float]
_USUAL_FOR_NS: Final = 600 * SECOND_NS
_TIMES_USUAL: Final = 4.0
"""A step may take so many times as long as those before it: a busy neighbour makes an engine slow, not stuck."""


def measure_of(rule: Rule) -> Measure:
    """What the threshold of `rule` is held against."""
    makers: dict[str, Callable[[], Measure]] = {
        KV_USAGE: lambda: _while_it_runs(_kv_usage),
        PREEMPTIONS: lambda: _while_it_runs(Sum(rule.seconds, lambda second: second.preemptions, is_rate=True)),
        WAITING: lambda: _while_it_runs(_longest_wait),
        RUN_OUT: RunOut,
        HOT: lambda: lambda second: second.temperature_celsius,
        FRAMES_LOST: lambda: Sum(rule.seconds, lambda second: second.num_lost_frames, is_rate=False),
        STUCK: lambda: _while_it_runs(Stalled()),
    }
    return makers[rule.kind]()


def _while_it_runs(measure: Measure) -> Measure:
    """Not known of a second in which the engine stood still: what it shows then is nobody's trouble."""
    return lambda second: math.nan if second.stopped_s else measure(second)


class Sum:
    """Over the last seconds; with `is_rate`, a second's share of it."""

    def __init__(self, seconds: float, count: Measure, *, is_rate: bool) -> None:
        self._length_s = max(seconds, 1.0)
        self._count, self._is_rate = count, is_rate
        self._counts: deque[tuple[int, float]] = deque()

    def __call__(self, second: Second) -> float:
        self._counts.append((second.time_ns, self._count(second)))
        while second.time_ns - self._counts[0][0] >= self._length_s * SECOND_NS:
            self._counts.popleft()
        total = math.fsum(count for _, count in self._counts)
        return total / self._length_s if self._is_rate else total


class RunOut:
    """Seconds until free blocks are gone; infinite where they are not going, once they are gone, and while the engine
    stands still."""

    def __init__(self) -> None:
        self._seconds: deque[Second] = deque(maxlen=WINDOW_S)

    def __call__(self, second: Second) -> float:
        if second.stopped_s or second.room <= 0:
            self._seconds.clear()
            return math.inf
        self._seconds.append(second)
        first_ns = self._seconds[0].time_ns
        times = np.array([(each.time_ns - first_ns) / 1e9 for each in self._seconds])
        if math.isnan(second.room):
            return math.nan
        left_s = seconds_left(times, np.array([each.room for each in self._seconds]), second.num_blocks)
        return math.inf if left_s is None else left_s


class Stalled:
    """Seconds without a step that ended; 0 while steps merely take what they lately took, or a few times that."""

    def __init__(self) -> None:
        self._before_s = 0.0
        self._took: deque[tuple[int, float]] = deque()
        """When a step ended, and how long it took: longer ones alone, of those that count still."""

    def __call__(self, second: Second) -> float:
        if second.num_steps > 0:
            self._note(second.time_ns, max(second.run_ns / second.num_steps / 1e9, self._before_s))
        while self._took and second.time_ns - self._took[0][0] > _USUAL_FOR_NS:
            self._took.popleft()
        self._before_s = 0.0 if math.isnan(second.stalled_s) else second.stalled_s
        usual_s = self._took[0][1] if self._took else 0.0
        return 0.0 if second.stalled_s <= _TIMES_USUAL * usual_s else second.stalled_s

    def _note(self, time_ns: int, took_s: float) -> None:
        while self._took and self._took[-1][1] <= took_s:
            self._took.pop()
        self._took.append((time_ns, took_s))


def _kv_usage(second: Second) -> float:
    usage = USAGE.of({"active": second.active_blocks, "pool": second.num_blocks})
    return math.nan if usage is None else 100.0 * usage


def _longest_wait(second: Second) -> float:
    """Of those that wait; in recordings of before that was told, of those that waited until then."""
    if not math.isnan(second.longest_wait_s) or math.isnan(second.num_steps):
        return second.longest_wait_s
    return 0.0 if math.isnan(second.queued_p99_s) else second.queued_p99_s
