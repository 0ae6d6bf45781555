"""A mirror that follows recorded messages, and knows when it no longer can.

Owns the mirror and the sequence; frames are applied in batches, as that costs least. Knows no files.
"""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.coalesce import coalesce
from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages import Frame, Snapshot, TelemetryMessage
from kvscope_telemetry.mirror import Mirror

MAX_PENDING: Final = 256


class Follower:
    """Feed it every message in order; `mirror` is up to date after `settle`.

    Where frames are missing it stays as it is until the next snapshot.
    """

    def __init__(self) -> None:
        self.mirror = Mirror()
        self._pending: list[Frame] = []
        self._seq = 0
        self._is_lost = True

    @property
    def is_lost(self) -> bool:
        """Whether the state is not known: no snapshot came yet, or frames are missing since."""
        return self._is_lost

    def feed(self, message: TelemetryMessage) -> None:
        """The next message; all but snapshots and frames change nothing."""
        if isinstance(message, Snapshot):
            self._reset(message)
        elif isinstance(message, Frame):
            self._follow(message)

    def settle(self) -> None:
        """Bring the mirror up to date."""
        pending, self._pending = self._pending, []
        if pending:
            try:
                self.mirror.apply(coalesce(pending))
            except ProtocolError:
                self._is_lost = True

    def _reset(self, snapshot: Snapshot) -> None:
        self.settle()
        if self._is_at(snapshot.hello.epoch) and snapshot.seq <= self._seq:
            return
        try:
            self.mirror.reset(snapshot)
        except ProtocolError:
            self._is_lost = True
        else:
            self._seq, self._is_lost = snapshot.seq, False

    def _follow(self, frame: Frame) -> None:
        if self._is_lost or (self._is_at(frame.epoch) and frame.seq <= self._seq):
            return
        if not self._is_at(frame.epoch) or frame.seq != self._seq + 1:
            self.settle()
            self._is_lost = True
            return
        self._seq = frame.seq
        self._pending.append(frame)
        if len(self._pending) >= MAX_PENDING:
            self.settle()

    def _is_at(self, epoch: int) -> bool:
        return not self._is_lost and self.mirror.epoch == epoch
