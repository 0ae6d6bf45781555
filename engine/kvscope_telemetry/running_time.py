"""Running time: the time between two moments, without the engine's stops. The engine is stopped while a user has paused
it or its process is suspended.

All latencies are measured in running time: queue time, time to first token, time between tokens, time preempted. Owns
the stops on one clock (an engine's or a recording's). Independent of files, views, and texts of events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvscope_telemetry.messages.telemetry import PAUSED, SUSPENDED, Event, Stop

IntArray = npt.NDArray[np.int64]
MAX_STOPS: Final = 4096
"""Maximum number of stops in a `RunningTime`; the oldest are dropped. A user who single-steps for an hour
causes some hundreds.
"""
_OPEN_NS: Final = (1 << 63) - 1


class RunningTime:
    """Stops on one clock, sorted by their ends. Not thread-safe."""

    def __init__(self, stops: Iterable[Stop] = ()) -> None:
        self.version = 0
        self._stops: list[Stop] = []
        self._begins = self._ends = self._stopped_before = np.empty(0, np.int64)
        self._last_ns = -_OPEN_NS
        self._is_counted = True
        for stop in stops:
            self.add(stop)

    def __len__(self) -> int:
        return len(self._stops)

    def __iter__(self) -> Iterator[Stop]:
        return iter(self._stops)

    @property
    def open(self) -> Stop | None:
        """The current stop, which has no end yet; None if the engine runs."""
        return self._stops[-1] if self._stops and not self._stops[-1].end_ns else None

    @property
    def stretches(self) -> tuple[IntArray, IntArray]:
        """Start and end of each interval in which the engine was stopped: ascending, without overlaps, shape
        (n,) each.
        """
        self._count()
        return self._begins, self._ends

    def since(self, time_ns: int) -> tuple[Stop, ...]:
        """Return the stops that still last or ended after `time_ns`."""
        return tuple(stop for stop in self._stops if not stop.end_ns or stop.end_ns > time_ns)

    def within(self, first_ns: int, last_ns: int) -> list[Stop]:
        """Return the stops in a time range, clipped to it."""
        clipped = []
        for stop in self._stops:
            begin_ns, end_ns = max(stop.begin_ns, first_ns), min(stop.end_ns or _OPEN_NS, last_ns)
            if begin_ns < end_ns:
                clipped.append(replace(stop, begin_ns=begin_ns, end_ns=end_ns))
        return clipped

    def add(self, stop: Stop) -> None:
        """Add a stop. It is merged with overlapping stops of the same kind and user."""
        overlapping = [
            other
            for other in self._stops
            if (other.kind, other.by) == (stop.kind, stop.by)
            and other.begin_ns <= (stop.end_ns or _OPEN_NS)
            and stop.begin_ns <= (other.end_ns or _OPEN_NS)
        ]
        if stop in overlapping:
            return
        for other in overlapping:
            self._stops.remove(other)
            end_ns = max(stop.end_ns, other.end_ns) if stop.end_ns and other.end_ns else 0
            stop = replace(stop, begin_ns=min(stop.begin_ns, other.begin_ns), end_ns=end_ns)
        self._stops.append(stop)
        self._stops.sort(key=lambda other: other.end_ns or _OPEN_NS)
        self._record_change()

    def begin(self, time_ns: int, by: str) -> None:
        self.end(time_ns)
        self.add(Stop(begin_ns=time_ns, by=by))

    def end(self, time_ns: int) -> None:
        stop = self.open
        if stop is None:
            return
        self._stops.pop()
        if time_ns > stop.begin_ns:
            self.add(replace(stop, end_ns=time_ns))
        self._record_change()

    def record(self, event: Event) -> None:
        """Apply an event that starts or ends a stop. Other events are ignored."""
        data, time_ns = event.data, event.time_ns
        if event.kind == "engine_paused":
            self.begin(time_ns, data.by if data is not None else "")
        elif event.kind == "engine_resumed":
            self.end(time_ns)
        elif event.kind == "single_step" and data is not None and (stop := self.open) is not None:
            self.end(max(stop.begin_ns, time_ns - max(0, data.lasted_ns)))
            self.begin(time_ns, stop.by)
        elif event.kind == "process_suspended" and data is not None and data.lasted_ns > data.slept_ns:
            self.add(Stop(begin_ns=max(1, time_ns - data.lasted_ns + data.slept_ns), end_ns=time_ns, kind=SUSPENDED))

    def catch_up(self, stops: Sequence[Stop], time_ns: int) -> None:
        """Apply the stops that an engine reported at `time_ns`. Whether the engine is stopped now follows from
        them alone; earlier stops that they do not include are kept.
        """
        if self.open is not None:
            self.end(stops[-1].begin_ns if stops else time_ns)
        for stop in stops:
            self.add(stop)

    def shifted(self, offset_ns: int) -> RunningTime:
        """Return a copy with all times increased by `offset_ns`, for use with a clock that is ahead by `offset_ns`."""
        return RunningTime(
            replace(stop, begin_ns=stop.begin_ns + offset_ns, end_ns=stop.end_ns and stop.end_ns + offset_ns)
            for stop in self._stops
        )

    def forget_before(self, time_ns: int) -> None:
        """Drop the stops that ended at or before `time_ns`."""
        remaining = list(self.since(time_ns))
        if len(remaining) < len(self._stops):
            self._stops = remaining
            self._record_change()

    def stopped_ns(self, from_ns: int, until_ns: int) -> int:
        """Return the stopped time between two moments. Overlapping stops count once."""
        if from_ns >= until_ns or from_ns >= self._last_ns:
            return 0
        return int(self._stopped_until(np.array([until_ns]))[0] - self._stopped_until(np.array([from_ns]))[0])

    def stopped_text(self, *spans: tuple[int, int]) -> str:
        """Return how the engine was stopped within `spans`: "paused", "suspended", "paused or suspended", or ""."""
        stops = (stop for from_ns, until_ns in spans for stop in self.within(from_ns, until_ns))
        return " or ".join(sorted({PAUSED if stop.kind == PAUSED else SUSPENDED for stop in stops}))

    def running_ns(self, from_ns: int, until_ns: int) -> int:
        """Return the time between two moments without stops. Never negative."""
        return max(0, until_ns - from_ns - self.stopped_ns(from_ns, until_ns))

    def running_between(self, from_ns: IntArray, until_ns: IntArray) -> IntArray:
        """Return `running_ns` for arrays of start and end times, shape (n,)."""
        length: IntArray = np.maximum(until_ns - from_ns, 0)
        if not self._stops:
            return length
        stopped = np.maximum(self._stopped_until(until_ns) - self._stopped_until(from_ns), 0)
        length -= stopped
        return length.clip(0)

    def _stopped_until(self, times_ns: IntArray) -> IntArray:
        self._count()
        index = np.searchsorted(self._begins, times_ns, "right") - 1
        stopped_in_interval = np.minimum(times_ns, self._ends[index]) - self._begins[index]
        stopped: IntArray = np.where(index < 0, 0, self._stopped_before[index] + stopped_in_interval)
        return stopped

    def _count(self) -> None:
        """Compute disjoint, ascending intervals from the stops, and the total stopped time before each interval."""
        if self._is_counted:
            return
        stretches: list[list[int]] = []
        for begin_ns, end_ns in sorted((stop.begin_ns, stop.end_ns or _OPEN_NS) for stop in self._stops):
            if stretches and begin_ns <= stretches[-1][1]:
                stretches[-1][1] = max(stretches[-1][1], end_ns)
            else:
                stretches.append([begin_ns, end_ns])
        self._begins, self._ends = np.array(stretches, np.int64).reshape(-1, 2).T.copy()
        lengths = self._ends - self._begins
        self._stopped_before = np.cumsum(lengths) - lengths
        self._is_counted = True

    def _record_change(self) -> None:
        del self._stops[:-MAX_STOPS]
        self.version += 1
        self._is_counted = False
        self._last_ns = max((stop.end_ns or _OPEN_NS for stop in self._stops), default=-_OPEN_NS)


def stop_text(stop: Stop) -> str:
    """Return the label of a stop: "paused by NAME", "paused" or "process suspended"."""
    if stop.kind == PAUSED:
        return f"paused by {stop.by}" if stop.by else "paused"
    return "process suspended"
