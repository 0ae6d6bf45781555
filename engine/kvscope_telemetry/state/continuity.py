"""Which frames and snapshots go on from the state there is.

A frame goes on when it is the very next, a snapshot when it is newer. After a hole nothing does until a snapshot. Knows
no mirror.
"""

from __future__ import annotations

from kvscope_telemetry.messages.telemetry import Frame, Snapshot
from kvscope_telemetry.state.state_place import StatePlace


class Continuity:
    """Ask `takes` of every frame and snapshot in order; True: the state follows it."""

    def __init__(self) -> None:
        self._place = StatePlace()
        self.is_lost = True
        """Whether the state is not known: no snapshot came yet, or frames are missing since."""

    @property
    def epoch(self) -> int | None:
        """Of the engine that is followed, None before the first snapshot."""
        return self._place.epoch

    @property
    def seq(self) -> int:
        """The last frame that the state knows of."""
        return self._place.seq

    def lose(self) -> None:
        """What was taken did not fit after all."""
        self.is_lost = True

    def takes(self, message: Frame | Snapshot) -> bool:
        """Whether the state goes on with `message`."""
        return self._takes_frame(message) if isinstance(message, Frame) else self._takes_snapshot(message)

    def _takes_snapshot(self, snapshot: Snapshot) -> bool:
        if not self.is_lost and not self._place.is_newer(snapshot):
            return False
        self._place.go_to(snapshot)
        self.is_lost = False
        return True

    def _takes_frame(self, frame: Frame) -> bool:
        if self.is_lost or self._place.has(frame):
            return False
        self.is_lost = not self._place.is_before(frame)
        if not self.is_lost:
            self._place.advance(frame)
        return not self.is_lost
