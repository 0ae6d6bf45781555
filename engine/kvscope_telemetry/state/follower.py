"""A mirror that follows messages in their order, and knows when it no longer can.

Owns the mirror; frames are applied in batches, as that costs least. Knows no files.
"""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.telemetry import Frame, Snapshot, TelemetryMessage
from kvscope_telemetry.state.coalesce import state_after
from kvscope_telemetry.state.continuity import Continuity
from kvscope_telemetry.state.mirror import Mirror

MAX_PENDING: Final = 256


class Follower:
    """Feed it every message in order; `mirror` is up to date after `settle`.

    Where frames are missing it stays as it is until the next snapshot.
    """

    def __init__(self) -> None:
        self.mirror = Mirror()
        self._pending: list[Frame] = []
        self._continuity = Continuity()

    @property
    def is_lost(self) -> bool:
        """Whether the state is not known: no snapshot came yet, or frames are missing since."""
        return self._continuity.is_lost

    def feed(self, message: TelemetryMessage) -> None:
        """The next message; all but snapshots and frames change nothing."""
        if isinstance(message, Snapshot):
            self._reset(message)
        elif isinstance(message, Frame) and self._continuity.takes(message):
            self._pending.append(message)
            if len(self._pending) >= MAX_PENDING:
                self.settle()

    def settle(self) -> None:
        """Bring the mirror up to date."""
        pending, self._pending = self._pending, []
        if pending:
            try:
                self.mirror.apply(state_after(pending))
            except ProtocolError:
                self._continuity.lose()

    def _reset(self, snapshot: Snapshot) -> None:
        self.settle()
        if self._continuity.takes(snapshot):
            try:
                self.mirror.reset(snapshot)
            except ProtocolError:
                self._continuity.lose()
