"""How long an engine's unfinished requests have been without a step that ended. Knows heartbeats alone.

All by the engine's clock: a window that is slow, or a wire that is, makes an engine look no slower.
"""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.messages.telemetry import Heartbeat

_LATE_NS: Final = 2_000_000_000
"""Heartbeats come twice a second: after a longer silence the whole process had no time, and no step could end."""


class Stall:
    """Fed with the heartbeats of an engine in their order."""

    def __init__(self) -> None:
        self._place: tuple[int, int] | None = None  # epoch and step
        self._since_ns = self._last_ns = 0

    def seen(self, beat: Heartbeat) -> float:
        """Seconds since a step ended, or there was something to do."""
        place = (beat.epoch, beat.step)
        if place != self._place or not beat.num_unfinished or beat.paused_by:
            self._place, self._since_ns = place, beat.time_ns
        elif beat.time_ns - self._last_ns > _LATE_NS:
            self._since_ns += beat.time_ns - self._last_ns
        self._last_ns = beat.time_ns
        return max(0, beat.time_ns - self._since_ns) / 1e9
