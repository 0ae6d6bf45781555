"""Time range with zooming and panning. Imports no Qt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SHORTEST_NS: Final = 100_000
"""Minimum length in ns of a range that the user zooms to. It is shorter than a step, which takes milliseconds, because
events within a step have exact times.
"""
SHORTEST_WHOLE_NS: Final = 10_000_000_000
"""Shortest range of a whole timeline in ns, so that one second of a new session does not fill the width."""


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """Time range on the wall clock (nanoseconds since 1970)."""

    begin_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.begin_ns

    def share_at(self, time_ns: int) -> float:
        """Return the relative position of a time: 0 at the start, 1 at the end, less or more outside."""
        return (time_ns - self.begin_ns) / self.length_ns

    def time_at(self, share: float) -> int:
        return self.begin_ns + round(share * self.length_ns)

    def zoomed(self, factor: float, at_share: float, whole: TimeSpan) -> TimeSpan:
        """Return a range `factor` times as long, within `whole`, in which the time at `at_share` has the same position
        if possible.
        """
        length_ns = min(max(round(self.length_ns * factor), SHORTEST_NS), whole.length_ns)
        begin_ns = self.time_at(at_share) - round(length_ns * at_share)
        return TimeSpan(begin_ns, begin_ns + length_ns).clamped_to(whole)

    def moved(self, by_ns: int, whole: TimeSpan) -> TimeSpan:
        """Return the range shifted later by `by_ns`, within `whole`."""
        return TimeSpan(self.begin_ns + by_ns, self.end_ns + by_ns).clamped_to(whole)

    def clamped_to(self, whole: TimeSpan) -> TimeSpan:
        """Return the range shifted into `whole`, or `whole` if the range is longer."""
        if self.length_ns >= whole.length_ns:
            return whole
        begin_ns = min(max(self.begin_ns, whole.begin_ns), whole.end_ns - self.length_ns)
        return TimeSpan(begin_ns, begin_ns + self.length_ns)

    def shifted_to_show(self, time_ns: int, whole: TimeSpan) -> TimeSpan:
        """Return the range shifted as little as possible so that it contains `time_ns`, within `whole`."""
        too_early_ns, too_late_ns = self.begin_ns - time_ns, time_ns - self.end_ns
        return self.moved(-too_early_ns if too_early_ns > 0 else max(too_late_ns, 0), whole)


def whole_span(begin_ns: int, end_ns: int) -> TimeSpan:
    """Return the range from `begin_ns` to `end_ns`, extended to at least `SHORTEST_WHOLE_NS`."""
    return TimeSpan(begin_ns, max(end_ns, begin_ns + SHORTEST_WHOLE_NS))
