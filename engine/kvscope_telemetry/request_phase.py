"""Phases of a request, derived from its events and its state.

The timeline's lanes, the summaries of recordings and the exports share this definition. The only telemetry messages it
needs are events.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Event


class RequestPhase(IntEnum):
    """Phase of a request, or how it ended. If several phases fall on one pixel of the timeline, the one with
    the greatest value is drawn.
    """

    RUNNING = 0
    """The request is in a batch. Used if it is unknown whether the request is in prefill or decode."""
    DECODE = 1
    PREFILL = 2
    """The engine computes the KV of the prompt, or KV lost by a preemption."""
    QUEUED = 3
    PREEMPTED = 4
    """The request was preempted, and its KV will be recomputed."""
    SWAPPED = 5
    """The request was preempted, and its blocks were moved to a lower tier."""
    ABORTED = 6
    """The request was aborted. Like `REFUSED`, this is a point in time without a duration."""
    REFUSED = 7

    @property
    def label(self) -> str:
        """Name of the phase in exports, such as "queued" or "prefill"."""
        return self.name.lower()


PREEMPTED_PHASES: Final = (RequestPhase.PREEMPTED, RequestPhase.SWAPPED)
WAITING_PHASES: Final = (RequestPhase.QUEUED, *PREEMPTED_PHASES)
"""Phases in which a request is not in a batch."""
ENDS: Final = ("finished", "aborted", "refused")
_WAITING_STATES: Final = {
    int(RequestState.WAITING): RequestPhase.QUEUED,
    int(RequestState.PREEMPTED): RequestPhase.PREEMPTED,
}


def phase_after(event: Event) -> RequestPhase | None:
    data = event.data
    if event.kind == "preempted":
        return RequestPhase.SWAPPED if data is not None and data.is_swapped else RequestPhase.PREEMPTED
    if event.kind not in ("admitted", "resumed"):
        return None
    # A request with at most one uncomputed token decodes immediately: a fork, or a fully cached prompt.
    is_decode = data is not None and (data.kind == "forked" or data.num_known_tokens - event.num_tokens <= 1)
    return RequestPhase.DECODE if is_decode else RequestPhase.PREFILL


def phase_of_state(state: int, num_output_tokens: int) -> RequestPhase | None:
    """Return the phase of a request by its `RequestState`, without events; None if it has ended."""
    if state == RequestState.RUNNING:
        return RequestPhase.DECODE if num_output_tokens else RequestPhase.PREFILL
    return _WAITING_STATES.get(state)
