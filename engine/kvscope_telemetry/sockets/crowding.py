"""When a publisher is so busy that it should let some messages come together: each turn of its thread costs as much as
many of them, and takes its time from the thread that makes them.

Owns how many there were lately. Steps of an engine with a model are far fewer; nothing of theirs waits.
"""

from __future__ import annotations

from typing import Final

NAP_S: Final = 0.001
CROWDED_HZ: Final = 2_000
"""Messages a second from which on it naps."""
_LATELY_S: Final = 0.02


class Crowding:
    """Tell it of each turn; it says how long to nap before the next."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._num_messages = 0
        self._is_crowded = False

    def nap_s(self, num_messages: int, now_s: float) -> float:
        """After a turn that ended at `now_s`, by the monotonic clock, in which so many were sent."""
        self._num_messages += num_messages
        lasted_s = now_s - self._since_s
        if lasted_s >= _LATELY_S:
            self._is_crowded = self._num_messages >= CROWDED_HZ * lasted_s
            self._since_s, self._num_messages = now_s, 0
        return NAP_S if self._is_crowded and num_messages else 0.0
