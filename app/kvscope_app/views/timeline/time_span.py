"""The part of a timeline that is visible, and how it is zoomed and moved. Knows no Qt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SHORTEST_NS: Final = 100_000
"""Events' times are exact; a step takes some milliseconds."""
SHORTEST_WHOLE_NS: Final = 10_000_000_000
"""A timeline that has just begun is not drawn as if its first second were all."""


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """From `begin_ns` to `end_ns`, wall clock."""

    begin_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        """How much is seen."""
        return self.end_ns - self.begin_ns

    def share_at(self, time_ns: int) -> float:
        """Where a time is, 0 at the begin and 1 at the end."""
        return (time_ns - self.begin_ns) / self.length_ns

    def time_at(self, share: float) -> int:
        """The time at a share of it."""
        return self.begin_ns + round(share * self.length_ns)

    def zoomed(self, factor: float, at_share: float, whole: TimeSpan) -> TimeSpan:
        """`factor` times as much; the time at `at_share` stays there as far as `whole` allows."""
        length_ns = min(max(round(self.length_ns * factor), SHORTEST_NS), whole.length_ns)
        begin_ns = self.time_at(at_share) - round(length_ns * at_share)
        return TimeSpan(begin_ns, begin_ns + length_ns).inside(whole)

    def moved(self, by_ns: int, whole: TimeSpan) -> TimeSpan:
        """Later by `by_ns`, within `whole`."""
        return TimeSpan(self.begin_ns + by_ns, self.end_ns + by_ns).inside(whole)

    def inside(self, whole: TimeSpan) -> TimeSpan:
        """As long as it is, moved into `whole`; all of it where it is longer."""
        if self.length_ns >= whole.length_ns:
            return whole
        begin_ns = min(max(self.begin_ns, whole.begin_ns), whole.end_ns - self.length_ns)
        return TimeSpan(begin_ns, begin_ns + self.length_ns)

    def showing(self, time_ns: int, whole: TimeSpan) -> TimeSpan:
        """Moved as little as needed for `time_ns` to be in it."""
        early, late = self.begin_ns - time_ns, time_ns - self.end_ns
        return self.moved(-early if early > 0 else max(late, 0), whole)


def whole_span(begin_ns: int, end_ns: int) -> TimeSpan:
    """All there is, and never less than some seconds."""
    return TimeSpan(begin_ns, max(end_ns, begin_ns + SHORTEST_WHOLE_NS))
