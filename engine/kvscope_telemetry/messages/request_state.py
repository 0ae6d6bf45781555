"""Words about requests that both sides of the wire share."""

from __future__ import annotations

from enum import IntEnum


class RequestState(IntEnum):
    """Where a request is in its life. The order is that of the life; values are on the wire."""

    WAITING = 0
    """In the queue, holds no block."""
    RUNNING = 1
    """Has blocks; runs in each step that has room for it."""
    PREEMPTED = 2
    """Back in the queue: its blocks were needed for another. Loses nothing but time."""
    FINISHED = 3
    """Ended: stop, length, abort or error. Holds no block."""
    UNKNOWN = 255
    """A state that this version has no name for; no engine sends it."""
