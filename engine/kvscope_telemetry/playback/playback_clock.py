"""Where in a recording one is: goes on with a clock, times a speed, until the end. Knows no file and no thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MAX_TICK_NS: Final = 100_000_000
"""Who was away for longer than this, or cannot keep up, plays slower instead of skipping."""
MIN_SPEED, MAX_SPEED = 0.01, 1000.0


class PlaybackClock:
    """At the start and standing still, at first. `clock` is monotonic, in ns."""

    def __init__(self, duration_ns: int, clock: Callable[[], int]) -> None:
        self.position_ns = 0
        """Recorded time since the start, as of the last tick."""
        self.duration_ns = duration_ns
        self.is_playing = False
        self.waits_at_end = False
        """Whether the end is not the end: more may come, and then it goes on."""
        self.speed = 1.0
        self._clock = clock
        self._last_ns = clock()

    @property
    def is_at_end(self) -> bool:
        """Whether there is nothing after this."""
        return self.position_ns >= self.duration_ns

    def play(self) -> None:
        """Go on from here."""
        self._last_ns = self._clock()
        self.is_playing = True

    def pause(self) -> None:
        """Stand still."""
        self.is_playing = False

    def jump(self, position_ns: int) -> None:
        """Be at `position_ns`, and go on from there if it plays."""
        self.position_ns = max(0, min(position_ns, self.duration_ns))
        self._last_ns = self._clock()

    def tick(self) -> int:
        """The position now. At the end it stands still."""
        now_ns = self._clock()
        passed_ns, self._last_ns = min(now_ns - self._last_ns, MAX_TICK_NS), now_ns
        if self.is_playing:
            self.position_ns = min(self.position_ns + int(passed_ns * self.speed), self.duration_ns)
            self.is_playing = self.waits_at_end or not self.is_at_end
        return self.position_ns
