"""Plausibility check of an engine's times: its clock may be wrong, but it does not jump.

Every time is compared with that of the snapshot (or of the first message on a connection) plus the time since then on
our clock. Must not depend on sockets; `now_ns` is passed in, monotonic.
"""

from __future__ import annotations

from typing import Final

MAX_JUMP_NS: Final = 86_400_000_000_000
"""One day: more than a sleep of the machine or a message queue can explain."""


class EngineClock:
    """Follows the clock of one epoch."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._time_ns = self._last_sign_ns = 0

    def start(self, epoch: int, time_ns: int, now_ns: int) -> None:
        """Record that the engine's clock reads `time_ns` now."""
        self._epoch, self._time_ns, self._last_sign_ns = epoch, time_ns, now_ns

    def reset(self) -> None:
        """Accept any time next, because the machine may have slept before the connection came back."""
        self._epoch = None

    def accepts(self, epoch: int, time_ns: int, now_ns: int) -> bool:
        """Return whether the engine's clock can read `time_ns` now. Times of another epoch are always accepted and not
        followed.
        """
        if self._epoch is None:
            self.start(epoch, time_ns, now_ns)
        expected_ns = self._time_ns + now_ns - self._last_sign_ns
        return epoch != self._epoch or abs(time_ns - expected_ns) <= MAX_JUMP_NS
