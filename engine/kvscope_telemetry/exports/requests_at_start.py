"""Unfinished requests in the first state of a range: the range's figures do not contain what they did before.

A recording of an engine that already serves requests counts their ends, but not their admissions. `RequestsAtStart`
tells how many such requests there were, and what is known of their past.
"""

from __future__ import annotations

import msgspec
import numpy as np

from kvscope_telemetry.exports.span import Span
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Snapshot
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.plural import counted
from kvscope_telemetry.recordings.reader import Recording


class RequestsAtStart(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of unfinished requests. Fields that default to None are None if the engine does not report individual
    requests.
    """

    num_running: int
    num_waiting: int
    """Waiting requests, including preempted ones."""
    num_preempted: int | None = None
    num_with_first_token: int | None = None
    num_prompt_tokens: int | None = None
    """Prompt tokens of the running and preempted requests. `num_cached_tokens` of them were found in the prefix cache.
    """
    num_cached_tokens: int | None = None

    @property
    def num_started(self) -> int:
        """Number of requests whose admission is not in the range."""
        return self.num_running + (self.num_preempted or 0)

    @property
    def text(self) -> str:
        """The requests by state, such as "6 running, 1 preempted, 2 waiting"; "" if there were none."""
        num_preempted = self.num_preempted or 0
        states = (
            (self.num_running, "running"),
            (num_preempted, "preempted"),
            (self.num_waiting - num_preempted, "waiting"),
        )
        return ", ".join(f"{count:,} {state}" for count, state in states if count)

    @property
    def missing_text(self) -> str:
        """Text that names the figures from which requests of before the range are missing; "" if none had started."""
        if not self.num_started:
            return ""
        first_tokens = f", {counted(self.num_with_first_token, 'first token')}" if self.num_with_first_token else ""
        return f"earlier, and so not counted: admission, queue time, cached and prefilled tokens{first_tokens}"


def requests_at_start(recording: Recording, span: Span) -> RequestsAtStart | None:
    """Return the unfinished requests in the first state of `span`; None if there is no state, or if several engines
    answer at the recorded address.
    """
    mirror = _first_state(recording, span)
    if mirror.hello is None or not mirror.capabilities.counters:
        return None
    if not mirror.capabilities.requests:
        counters = mirror.counters
        return RequestsAtStart(num_running=counters.num_running, num_waiting=counters.num_waiting)
    requests = mirror.requests
    is_running, is_preempted, is_waiting = (
        requests.state == state for state in (RequestState.RUNNING, RequestState.PREEMPTED, RequestState.WAITING)
    )
    has_started = is_running | is_preempted
    return RequestsAtStart(
        num_running=int(np.count_nonzero(is_running)),
        num_waiting=int(np.count_nonzero(is_waiting | is_preempted)),
        num_preempted=int(np.count_nonzero(is_preempted)),
        num_with_first_token=int(np.count_nonzero(has_started & (requests.num_output_tokens > 0))),
        num_prompt_tokens=int(requests.num_prompt_tokens[has_started].sum()),
        num_cached_tokens=int(requests.num_cached_tokens[has_started].sum()),
    )


def _first_state(recording: Recording, span: Span) -> Mirror:
    mirror = recording.state_at(span.from_s)
    if mirror.hello is not None:
        return mirror
    for at_s, message in recording.messages(span.from_s, span.until_s, keyframes=True):
        if isinstance(message, Snapshot):
            return recording.state_at(at_s)
    return mirror
