"""Where in an engine's life a state is, and which frames and snapshots go on from it: the one rule of epochs and
sequence numbers.

A frame goes on when it is the very next, a snapshot when it is newer. After a hole nothing does until a snapshot. Who
waits, asks or gives up is for its users. Knows no mirror.
"""

from __future__ import annotations

from kvscope_telemetry.messages.telemetry import DeltaCheckpoint, Frame, Snapshot


class StatePlace:
    """Before the first snapshot there is no epoch, and no frame is the next."""

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.seq = 0

    def copy(self) -> StatePlace:
        """The same place, to go on from by itself."""
        other = StatePlace()
        other.epoch, other.seq = self.epoch, self.seq
        return other

    def has(self, frame: Frame) -> bool:
        """Whether the state knows of `frame` already."""
        return frame.epoch == self.epoch and frame.seq <= self.seq

    def is_before(self, frame: Frame) -> bool:
        """Whether `frame` is the very next."""
        follows = frame.since_seq if isinstance(frame, DeltaCheckpoint) else frame.seq - 1
        return frame.epoch == self.epoch and follows == self.seq

    def is_newer(self, snapshot: Snapshot) -> bool:
        """Whether `snapshot` is of another epoch, or of later in this one."""
        return snapshot.hello.epoch != self.epoch or snapshot.seq > self.seq

    def go_to(self, snapshot: Snapshot) -> None:
        """The state is that of `snapshot`."""
        self.epoch, self.seq = snapshot.hello.epoch, snapshot.seq

    def advance(self, frame: Frame) -> None:
        """The state follows `frame`, which was the next."""
        assert self.is_before(frame), f"frame {frame.seq} does not follow {self.seq}"
        self.seq = frame.seq


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
