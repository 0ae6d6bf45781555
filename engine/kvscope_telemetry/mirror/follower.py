"""Mirror to which messages are passed one by one in order, and which detects missing frames.

Owns the mirror. Frames are applied in batches, which is faster. Must not depend on files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.telemetry import Frame, Snapshot, TelemetryMessage
from kvscope_telemetry.mirror.coalesce import state_after
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.state_continuity import Continuity

MAX_PENDING: Final = 256


class Follower:
    """Applies snapshots and frames to a mirror, which is up to date after `apply_pending`.

    If frames are missing, the mirror does not change until the next snapshot.
    """

    def __init__(self) -> None:
        self.mirror = Mirror()
        self._pending: list[Frame] = []
        self._continuity = Continuity()

    @property
    def is_lost(self) -> bool:
        """Whether the state is unknown, because no snapshot has arrived yet, or frames have been missing since
        the last one.
        """
        return self._continuity.is_lost

    @property
    def pending(self) -> Sequence[Frame]:
        """Frames that were accepted since the last `apply_pending`."""
        return self._pending

    def feed(self, message: TelemetryMessage) -> None:
        """Process the next message. Messages other than snapshots and frames are ignored."""
        if isinstance(message, Snapshot):
            self._reset(message)
        elif isinstance(message, Frame) and self._continuity.accepts(message):
            self._pending.append(message)
            if len(self._pending) >= MAX_PENDING:
                self.apply_pending()

    def apply_pending(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            try:
                self.mirror.apply(state_after(pending))
            except ProtocolError:
                self._continuity.mark_lost()

    def _reset(self, snapshot: Snapshot) -> None:
        self.apply_pending()
        if self._continuity.accepts(snapshot):
            try:
                self.mirror.reset(snapshot)
            except ProtocolError:
                self._continuity.mark_lost()
