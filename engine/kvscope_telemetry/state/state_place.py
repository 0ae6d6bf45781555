"""Where in an engine's life a state is, and which frame is the next: the one rule of epochs and sequence numbers.

Owns epoch and number of the last frame that the state knows of. Who waits, asks or gives up is for its users.
"""

from __future__ import annotations

from kvscope_telemetry.messages.delta_checkpoint import DeltaCheckpoint
from kvscope_telemetry.messages.telemetry import Frame, Snapshot


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
