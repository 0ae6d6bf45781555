"""Plausibility check of an engine's times: its clock may be wrong, but it does not jump.

Each time is compared with that of the snapshot (or of the first message on a connection) plus the time since then on
this machine's clock. Must not depend on sockets; callers pass `now_ns`, monotonic.
"""

from __future__ import annotations

from typing import Final

MAX_JUMP_NS: Final = 86_400_000_000_000
"""Maximum deviation of a time: one day, which is more than a sleep of the machine or a message queue can explain."""


class EngineClock:
    """Expected time on the engine's clock in one epoch."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._time_ns = self._last_sign_ns = 0

    def start(self, epoch: int, time_ns: int, now_ns: int) -> None:
        """Record that the engine's clock shows `time_ns` at `now_ns`."""
        self._epoch, self._time_ns, self._last_sign_ns = epoch, time_ns, now_ns

    def reset(self) -> None:
        """Accept any time next, because the machine may have slept before the reconnection."""
        self._epoch = None

    def accepts(self, epoch: int, time_ns: int, now_ns: int) -> bool:
        """Return whether the engine's clock can show `time_ns` at `now_ns`. Times of another epoch are always
        accepted.
        """
        if self._epoch is None:
            self.start(epoch, time_ns, now_ns)
        expected_ns = self._time_ns + now_ns - self._last_sign_ns
        return epoch != self._epoch or abs(time_ns - expected_ns) <= MAX_JUMP_NS
