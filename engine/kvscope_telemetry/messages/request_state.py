"""Enums for the state of requests that both sides of the wire use."""

from __future__ import annotations

from enum import IntEnum


class RequestState(IntEnum):
    """State of a request, in the order of its life cycle. Values are used on the wire."""

    WAITING = 0
    """In the waiting queue, holding no blocks."""
    RUNNING = 1
    """Holds blocks, and runs in each step whose limits allow it."""
    PREEMPTED = 2
    """Back in the waiting queue because its blocks were needed for another request. It keeps its tokens."""
    FINISHED = 3
    """Ended by a stop condition, length, abort or error. Holds no blocks."""
    UNKNOWN = 255
    """A state that this version does not know; no engine sends it."""


class WaitsFor(IntEnum):
    """Reasons why a request is queued, as reported by its engine. Values are used on the wire."""

    UNKNOWN = 0
    """Not reported: the request is behind others in the queue, or arrived after the last step was scheduled."""
    BLOCKS = 1
    """Too few free KV blocks."""
    PLACE = 2
    """`max_num_seqs` requests run already."""
    BUDGET = 3
    """The token budget of the step (`max_num_batched_tokens`) is used up."""
    GRAMMAR = 4
    """The grammar of the request's structured output is being compiled."""
    REMOTE_KV = 5
    """KV is being transferred from elsewhere into blocks that the request already holds."""
    ADAPTER = 6
    """The maximum number of LoRA adapters per batch is reached."""
    INPUT = 7
    """The rest of the request's prompt has not arrived yet."""
    PROMPT = 8
    """The prompt is being computed for another completion, whose blocks this request will share."""
