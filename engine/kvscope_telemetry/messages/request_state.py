"""Enums for the state of requests, which both sides of the wire use."""

from __future__ import annotations

from enum import IntEnum


class RequestState(IntEnum):
    """State of a request, in the order of its life cycle. The values are used on the wire."""

    WAITING = 0
    """In the waiting queue, without blocks."""
    RUNNING = 1
    """Has blocks, and runs in each step whose limits allow it."""
    PREEMPTED = 2
    """Back in the waiting queue because its blocks were needed for another request. It keeps its tokens."""
    FINISHED = 3
    """Ended by a stop condition, length, abort or error. Has no blocks."""
    UNKNOWN = 255
    """State that this version does not have. Never sent by an engine."""


class WaitsFor(IntEnum):
    """Reason why a request is queued, as reported by its engine. The values are used on the wire."""

    UNKNOWN = 0
    """Not reported, because the request is behind others in the queue, or arrived after the last step was scheduled."""
    BLOCKS = 1
    """Too few free KV blocks."""
    SEQUENCE_LIMIT = 2
    """`max_num_seqs` requests are running."""
    BUDGET = 3
    """The token budget of the step (`max_num_batched_tokens`) is used up."""
    GRAMMAR = 4
    """The grammar of the request's structured output is being compiled."""
    REMOTE_KV = 5
    """KV is being transferred from elsewhere into blocks that the request already has."""
    ADAPTER = 6
    """The maximum number of LoRA adapters per batch is reached."""
    INPUT = 7
    """Part of the request's prompt has not arrived yet."""
    PROMPT = 8
    """The prompt is being computed for another completion, with which this request will share blocks."""
