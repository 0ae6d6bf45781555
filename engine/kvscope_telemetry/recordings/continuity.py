"""Which recorded frames and snapshots go on from the state there is.

Owns epoch and sequence number: a frame goes on when it is the very next, a snapshot when it is newer. After a hole
nothing does until a snapshot. Knows no mirror.
"""

from __future__ import annotations

from kvscope_telemetry.messages.telemetry import Frame, Snapshot


class Sequence:
    """Ask `takes` of every frame and snapshot in order; True: the state follows it."""

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.seq = 0
        """The last frame that the state knows of."""
        self.is_lost = True
        """Whether the state is not known: no snapshot came yet, or frames are missing since."""

    def lose(self) -> None:
        """What was taken did not fit after all."""
        self.is_lost = True

    def takes(self, message: Frame | Snapshot) -> bool:
        """Whether the state goes on with `message`."""
        return self._takes_frame(message) if isinstance(message, Frame) else self._takes_snapshot(message)

    def _takes_snapshot(self, snapshot: Snapshot) -> bool:
        if self._is_at(snapshot.hello.epoch) and snapshot.seq <= self.seq:
            return False
        self.epoch, self.seq, self.is_lost = snapshot.hello.epoch, snapshot.seq, False
        return True

    def _takes_frame(self, frame: Frame) -> bool:
        if self.is_lost or (self._is_at(frame.epoch) and frame.seq <= self.seq):
            return False
        self.is_lost = not self._is_at(frame.epoch) or frame.seq != self.seq + 1
        if not self.is_lost:
            self.seq = frame.seq
        return not self.is_lost

    def _is_at(self, epoch: int) -> bool:
        return not self.is_lost and self.epoch == epoch
