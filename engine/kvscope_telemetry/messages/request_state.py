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


class WaitsFor(IntEnum):
    """What a request in the queue waits for, as its engine says. Values are on the wire."""

    UNTOLD = 0
    """It has not said: the request waits behind others, or came after the last step was planned."""
    BLOCKS = 1
    """Fewer can be had than it needs."""
    PLACE = 2
    """As many run as may."""
    BUDGET = 3
    """The tokens of the step are given out."""
    GRAMMAR = 4
    """The form of its answer is being compiled."""
    REMOTE_KV = 5
    """KV is on its way from elsewhere, into blocks that it holds already."""
    ADAPTER = 6
    """As many LoRA adapters are in the batch as may be."""
    INPUT = 7
    """More of its prompt is to come."""
    PROMPT = 8
    """The same prompt is being computed for another completion, whose blocks it will share."""
