"""Whether counters that went down mean that an engine started anew, or that several are behind one address."""

from __future__ import annotations

from typing import Final

MAX_RESTARTS: Final = 3
WITHIN_NS: Final = 60_000_000_000
"""An engine does not start more often in so long."""


class Restarts:
    """Tell it each time that counters went down."""

    def __init__(self) -> None:
        self.count = 0
        self._times_ns: list[int] = []

    @property
    def are_doubtful(self) -> bool:
        """Whether the counters go down so often that no engine's restarts explain it."""
        return len(self._times_ns) > MAX_RESTARTS

    def is_one(self, now_ns: int) -> bool:
        """Whether what happened now is to be believed."""
        self._times_ns = [time_ns for time_ns in self._times_ns if now_ns - time_ns < WITHIN_NS]
        self._times_ns.append(now_ns)
        self.count += not self.are_doubtful
        return not self.are_doubtful
