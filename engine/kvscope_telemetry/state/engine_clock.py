"""Tells times that can be an engine's from times that cannot: its clock may be wrong, but it does not jump.

Every time is compared with that of the snapshot (or of the first message on a connection) and with how long ago that
was heard by our own clock. Knows no sockets; `now_ns` is given, monotonic.
"""

from __future__ import annotations

from typing import Final

MAX_JUMP_NS: Final = 86_400_000_000_000
"""A day: a machine that slept, or a queue of messages, explains less."""


class EngineClock:
    """Follows the clock of one engine start."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._time_ns = self._heard_ns = 0

    def start(self, epoch: int, time_ns: int, now_ns: int) -> None:
        """The engine's clock reads `time_ns` now."""
        self._epoch, self._time_ns, self._heard_ns = epoch, time_ns, now_ns

    def forget(self) -> None:
        """Accept any time next: a connection came back, and a machine may have slept in between."""
        self._epoch = None

    def accepts(self, epoch: int, time_ns: int, now_ns: int) -> bool:
        """Whether the engine's clock can read `time_ns` now; True for another engine start, which is not followed."""
        if self._epoch is None:
            self.start(epoch, time_ns, now_ns)
        expected_ns = self._time_ns + now_ns - self._heard_ns
        return epoch != self._epoch or abs(time_ns - expected_ns) <= MAX_JUMP_NS
