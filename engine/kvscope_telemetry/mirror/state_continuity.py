"""The rule of epochs and sequence numbers: which frames and snapshots can follow a state.

A frame follows if it has the next sequence number. A snapshot follows if it is newer than the state. After a gap, only
a snapshot follows. Waiting for and requesting snapshots is left to the users of this module. Must not depend on the
mirror.
"""

from __future__ import annotations

from kvscope_telemetry.messages.telemetry import DeltaCheckpoint, Frame, Snapshot


class StatePosition:
    """Epoch and sequence number of a state. Before the first snapshot there is no epoch, and no frame follows."""

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.seq = 0

    def copy(self) -> StatePosition:
        other = StatePosition()
        other.epoch, other.seq = self.epoch, self.seq
        return other

    def has(self, frame: Frame) -> bool:
        """Return whether the state already includes `frame`."""
        return frame.epoch == self.epoch and frame.seq <= self.seq

    def is_before(self, frame: Frame) -> bool:
        """Return whether `frame` directly follows the state."""
        follows = frame.since_seq if isinstance(frame, DeltaCheckpoint) else frame.seq - 1
        return frame.epoch == self.epoch and follows == self.seq

    def is_newer(self, snapshot: Snapshot) -> bool:
        """Return whether `snapshot` is of another epoch, or later in the same epoch."""
        return snapshot.hello.epoch != self.epoch or snapshot.seq > self.seq

    def move_to(self, snapshot: Snapshot) -> None:
        self.epoch, self.seq = snapshot.hello.epoch, snapshot.seq

    def advance(self, frame: Frame) -> None:
        """Set the position to that of `frame`, which must directly follow the state."""
        assert self.is_before(frame), f"frame {frame.seq} does not follow {self.seq}"
        self.seq = frame.seq


class Continuity:
    """Decides which frames and snapshots of a sequence are applied. `accepts` must be called for each, in order."""

    def __init__(self) -> None:
        self._position = StatePosition()
        self.is_lost = True
        """Whether the state is unknown, because no snapshot has arrived yet, or frames have been missing since
        the last one.
        """

    @property
    def epoch(self) -> int | None:
        return self._position.epoch

    @property
    def seq(self) -> int:
        return self._position.seq

    def mark_lost(self) -> None:
        """Mark the state as unknown because an accepted message could not be applied."""
        self.is_lost = True

    def accepts(self, message: Frame | Snapshot) -> bool:
        """Return whether `message` is to be applied, and advance the position if so."""
        return self._accepts_frame(message) if isinstance(message, Frame) else self._accepts_snapshot(message)

    def _accepts_snapshot(self, snapshot: Snapshot) -> bool:
        if not self.is_lost and not self._position.is_newer(snapshot):
            return False
        self._position.move_to(snapshot)
        self.is_lost = False
        return True

    def _accepts_frame(self, frame: Frame) -> bool:
        if self.is_lost or self._position.has(frame):
            return False
        self.is_lost = not self._position.is_before(frame)
        if not self.is_lost:
            self._position.advance(frame)
        return not self.is_lost
