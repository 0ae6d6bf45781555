"""A delta checkpoint: several frames joined into one. It is in recordings alone; no engine sends it."""

from __future__ import annotations

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages import validity
from kvscope_telemetry.messages.telemetry import Frame


class DeltaCheckpoint(Frame, frozen=True, kw_only=True):
    """How all that changed between two frames stands after the second, which gives it number, step and time.

    What only happened in between (batches, timings, events, moves) is not in it.
    """

    since_seq: int = 0
    """The frame that it follows."""


def check_delta_checkpoint(checkpoint: DeltaCheckpoint) -> None:
    """Raise ProtocolError unless it is consistent in itself."""
    validity.check_frame(checkpoint)
    if not 0 <= checkpoint.since_seq < checkpoint.seq:
        raise ProtocolError(f"a delta checkpoint from frame {checkpoint.since_seq} to frame {checkpoint.seq}")
