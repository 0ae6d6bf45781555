"""Wall-clock times of steps, interpolated between an overview's seconds and the shown step. Imports no Qt."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

Ints = npt.NDArray[np.int64]
UNKNOWN: Final = -1


class StepTimes:
    """Times of steps since the engine's start, up to the shown step."""

    def __init__(self, overview: SessionOverview, mirror: Mirror) -> None:
        self._steps, self._times_ns = np.array([mirror.step]), np.array([_shown_ns(mirror)])
        indices = np.flatnonzero(overview.epoch == (mirror.epoch or 0))
        steps = overview.column("step")[indices]
        is_known = np.isfinite(steps) & (steps < mirror.step)
        if is_known.any():
            ends_ns = np.minimum(overview.time_ns[indices][is_known] + SECOND_NS, self._times_ns[0])
            self._steps = np.concatenate((steps[is_known].astype(np.int64), self._steps))
            self._times_ns = np.concatenate((ends_ns, self._times_ns))

    def times_of(self, steps: Ints) -> Ints:
        """Return the approximate time of each step in ns, in the shape of `steps`.

        The time of a step before the first known one is `UNKNOWN`.
        """
        begin_ns = int(self._times_ns[0])
        since_ns = np.interp(steps, self._steps, (self._times_ns - begin_ns).astype(np.float64))
        times_ns = begin_ns + since_ns.astype(np.int64)
        return np.where(steps < self._steps[0], UNKNOWN, times_ns)

    @property
    def first_ns(self) -> int:
        """Time of the first known step in ns. Steps whose time is `UNKNOWN` are earlier."""
        return int(self._times_ns[0])


def _shown_ns(mirror: Mirror) -> int:
    hello = mirror.hello
    return 0 if hello is None else mirror.time_ns + hello.wall_time_ns - hello.time_ns
