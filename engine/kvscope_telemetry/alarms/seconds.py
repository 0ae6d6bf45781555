"""Seconds of a course as alarms and forecast read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from kvscope_telemetry.alarms.forecast import WINDOW_S, seconds_left
from kvscope_telemetry.summaries.course import Course
from kvscope_telemetry.summaries.summary import SECOND_NS


class Second(NamedTuple):
    """One of them. Numbers are as in `Summary`; NaN: not known."""

    time_ns: int
    epoch: int
    num_steps: float = 0.0
    run_ns: float = 0.0
    num_lost_frames: float = 0.0
    active_blocks: float = 0.0
    cached_blocks: float = 0.0
    free_blocks: float = 0.0
    preemptions: float = 0.0
    temperature_celsius: float = np.nan
    longest_wait_s: float = np.nan
    stalled_s: float = np.nan
    queued_p99_s: float = np.nan
    pool_blocks: float = np.nan
    stopped_s: float = 0.0
    """How much of it the engine stood still, paused or suspended."""

    @property
    def num_blocks(self) -> float:
        """Of the pool."""
        if self.pool_blocks == self.pool_blocks:
            return self.pool_blocks
        return self.active_blocks + self.cached_blocks + self.free_blocks

    @property
    def room(self) -> float:
        """Blocks that nobody holds."""
        return self.cached_blocks + self.free_blocks


_COLUMNS: Final = Second._fields[2:-1]


def seconds_of(course: Course, first: int, last: int) -> Iterator[Second]:
    """Those at the places from `first` until before `last`."""
    columns = [course.column(name)[first:last].tolist() for name in _COLUMNS]
    times, epochs = course.time_ns[first:last].tolist(), course.epoch[first:last].tolist()
    columns.append([course.stops.stopped_ns(time_ns, time_ns + SECOND_NS) / SECOND_NS for time_ns in times])
    for time_ns, epoch, *numbers in zip(times, epochs, *columns, strict=True):
        yield Second(time_ns, epoch, *numbers)


def forecast_at(course: Course, time_ns: int) -> float | None:
    """Seconds until free blocks are gone, as it looked at `time_ns`; None where there is nothing to say."""
    last = course.place_at(time_ns) + 1
    if not last or time_ns - int(course.time_ns[last - 1]) > 5_000_000_000:
        return None
    first = max(0, last - WINDOW_S)
    first += int(np.count_nonzero(course.epoch[first:last] != course.epoch[last - 1]))
    if course.stops.stopped_ns(int(course.time_ns[first]), time_ns):
        return None  # what fell before need not fall afterwards
    active, cached, free = (course.column(f"{name}_blocks")[first:last] for name in ("active", "cached", "free"))
    pool = float(active[-1] + cached[-1] + free[-1])
    return seconds_left((course.time_ns[first:last] - course.time_ns[first]) / 1e9, cached + free, pool)
