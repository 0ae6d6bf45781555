"""The phases of a request, and how they follow from its events and its state.

The timeline's lanes, the summaries of recordings and the exports use this definition. Knows no messages but events.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Event


class RequestPhase(IntEnum):
    """Phase of a request, or how the request ended. Where several fall into one pixel, the greatest is drawn."""

    RUNNING = 0
    """In a batch, where prefill and decode are not told apart."""
    DECODE = 1
    PREFILL = 2
    """Its prompt, or KV that it lost, is computed."""
    QUEUED = 3
    PREEMPTED = 4
    """Preempted; its KV is computed again."""
    SWAPPED = 5
    """Preempted, its blocks in a lower tier."""
    ABORTED = 6
    """A moment, not a span; so is the next."""
    REFUSED = 7

    @property
    def label(self) -> str:
        """`queued`, `prefill`, `decode` …, as exports name the phase."""
        return self.name.lower()


PREEMPTED_PHASES: Final = (RequestPhase.PREEMPTED, RequestPhase.SWAPPED)
WAITING_PHASES: Final = (RequestPhase.QUEUED, *PREEMPTED_PHASES)
"""Phases in which a request is in no batch."""
ENDS: Final = ("finished", "aborted", "refused")
"""Kinds of the events that end a request."""
_WAITING_STATES: Final = {
    int(RequestState.WAITING): RequestPhase.QUEUED,
    int(RequestState.PREEMPTED): RequestPhase.PREEMPTED,
}


def phase_after(event: Event) -> RequestPhase | None:
    """Return the phase that begins with an event of the request; None for an event that begins none."""
    data = event.data
    if event.kind == "preempted":
        return RequestPhase.SWAPPED if data is not None and data.is_swapped else RequestPhase.PREEMPTED
    if event.kind not in ("admitted", "resumed"):
        return None
    # A request that lacks the KV of one token at most decodes at once: a fork, or a prompt that was cached.
    decodes = data is not None and (data.kind == "forked" or data.num_known_tokens - event.num_tokens <= 1)
    return RequestPhase.DECODE if decodes else RequestPhase.PREFILL


def phase_of_state(state: int, num_output_tokens: int) -> RequestPhase | None:
    """Return the phase of a request of which only the `RequestState` is known; None for one that ended."""
    if state == RequestState.RUNNING:
        return RequestPhase.DECODE if num_output_tokens else RequestPhase.PREFILL
    return _WAITING_STATES.get(state)
