"""Extracts the phases of requests from telemetry: waiting, prefill, decode, and preempted, with the request that caused
it.

Decides how phases follow from events and, for engines that report few events, from the states in frames. Must not
depend on files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvscope_telemetry.latencies import Moments
from kvscope_telemetry.messages.event_kinds import cause_text
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import (
    Event,
    Frame,
    RequestInfo,
    RequestRows,
    Snapshot,
    TelemetryMessage,
)
from kvscope_telemetry.request_phase import ENDS, PREEMPTED_PHASES, RequestPhase, phase_after
from kvscope_telemetry.running_time import RunningTime
from kvscope_telemetry.summaries.event_index import EventIndex


@dataclass(slots=True)
class PhaseSpan:
    """A phase of a request. Times are on the recording's clock."""

    kind: RequestPhase
    start_ns: int
    end_ns: int | None = None
    cause: str = ""
    preemptor_number: int = 0
    """Number of the request that caused this preemption; 0 if there is none."""


@dataclass(slots=True)
class RequestHistory:
    """Phases and end of a request. Times are on the recording's clock; None means not observed."""

    epoch: int
    info: RequestInfo
    arrival_ns: int
    moments: Moments
    """Moments on the engine's clock, from which latencies are computed."""
    state: int = RequestState.WAITING
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    waits_for: int = 0
    """The last `WaitsFor` that the engine reported while the request waited to start."""
    first_token_ns: int | None = None
    end_ns: int | None = None
    end: str = ""
    """Kind of end: "finished", "aborted" or "refused"; "ended" if the kind is unknown; "" for an unfinished request."""
    end_reason: str = ""
    phases: list[PhaseSpan] = field(default_factory=list)

    @property
    def queue_ns(self) -> int | None:
        """Nanoseconds from the arrival to the first step that ran the request, without the engine's stops; None if not
        observed.
        """
        return self.moments.queue_ns

    @property
    def is_ended(self) -> bool:
        return bool(self.end)

    def preempted_ns(self, until_ns: int) -> int:
        return sum(self.length_ns(phase, until_ns) for phase in self.phases if phase.kind in PREEMPTED_PHASES)

    def length_ns(self, phase: PhaseSpan, until_ns: int) -> int:
        """Return the duration of `phase` without the engine's stops. An unfinished phase counts until `until_ns`."""
        return self.moments.running.running_ns(*self._engine_times(phase, until_ns))

    def stopped_ns(self, phase: PhaseSpan, until_ns: int) -> int:
        return self.moments.running.stopped_ns(*self._engine_times(phase, until_ns))

    def stopped_text(self, phases: Iterable[PhaseSpan], until_ns: int) -> str:
        """Return how the engine was stopped in these phases: `paused`, `suspended`, `paused or suspended`, or ""."""
        return self.moments.running.stopped_text(*(self._engine_times(phase, until_ns) for phase in phases))

    def total_stopped_ns(self, until_ns: int) -> int:
        return self.stopped_ns(PhaseSpan(RequestPhase.QUEUED, self.arrival_ns, self.end_ns), until_ns)

    def _engine_times(self, phase: PhaseSpan, until_ns: int) -> tuple[int, int]:
        offset_ns = self.arrival_ns - self.moments.arrival_ns
        return phase.start_ns - offset_ns, (until_ns if phase.end_ns is None else phase.end_ns) - offset_ns

    def begin(self, kind: RequestPhase, time_ns: int, cause: str = "", other: int = 0) -> None:
        if self.phases:
            last = self.phases[-1]
            time_ns = max(time_ns, last.start_ns)
            last.end_ns = time_ns
        self.phases.append(PhaseSpan(kind, time_ns, None, cause, other))

    def finish(self, how: str, time_ns: int, reason: str = "") -> None:
        self.end, self.end_reason = how, reason
        self.end_ns = max(time_ns, self.phases[-1].start_ns) if self.phases else time_ns
        if self.phases:
            self.phases[-1].end_ns = self.end_ns

    @property
    def phase(self) -> RequestPhase | None:
        return self.phases[-1].kind if self.phases and not self.is_ended else None


class RequestHistoryReader:
    """Collects request histories. Call `add_message` with every message in order; `histories` has all requests in the
    order they were announced.

    `before` has events from before the first message. They complete the histories of requests that had already arrived.
    """

    def __init__(self, before: EventIndex | None = None) -> None:
        self.histories: dict[tuple[int, int], RequestHistory] = {}
        self._earlier_events = before
        self._epoch: int | None = None
        self._offset_ns = 0
        self._unfinished: dict[int, RequestHistory] = {}
        self._running = RunningTime()

    def add_message(self, message: TelemetryMessage, log_time_ns: int) -> None:
        if isinstance(message, Snapshot):
            self._apply_snapshot(message, log_time_ns)
        elif isinstance(message, Frame) and message.epoch == self._epoch:
            self._offset_ns = log_time_ns - message.time_ns
            for info in message.new_requests:
                self._announce(info).begin(RequestPhase.QUEUED, info.arrival_ns + self._offset_ns)
            for event in message.events:
                self._running.record(event)
                self._apply_event(event, event.time_ns + self._offset_ns)
            if message.requests.number:
                self._apply_rows(message.requests, log_time_ns)

    def _apply_snapshot(self, snapshot: Snapshot, log_time_ns: int) -> None:
        is_new = snapshot.hello.epoch != self._epoch
        if is_new:
            self._unfinished, self._running = {}, RunningTime()
        self._running.catch_up(snapshot.stops, snapshot.time_ns)
        self._epoch, self._offset_ns = snapshot.hello.epoch, log_time_ns - snapshot.time_ns
        listed = {info.number for info in snapshot.requests_info}
        for number in [number for number in self._unfinished if number not in listed]:
            self._unfinished.pop(number).finish("ended", log_time_ns, "while nothing was recorded")
        for info in snapshot.requests_info:
            if info.number not in self._unfinished:
                self._add_older_request(info, log_time_ns)
        if snapshot.requests.number:
            self._apply_rows(snapshot.requests, log_time_ns, is_snapshot=True)

    def _add_older_request(self, info: RequestInfo, log_time_ns: int) -> None:
        """Add a request that arrived before the first message. Its earlier phases are only known from events."""
        history = self._announce(info)
        if self._earlier_events is None:
            return
        indices = self._earlier_events.find(last_ns=log_time_ns, request=(history.epoch, info.number)).tolist()
        earlier = [self._earlier_events[index] for index in indices]
        earlier = [timed for timed in earlier if timed.event.number == info.number and timed.event.kind not in ENDS]
        if earlier and earlier[0].event.kind == "admitted":
            history.begin(RequestPhase.QUEUED, history.arrival_ns)
        for timed in earlier:
            self._apply_event(timed.event, timed.time_ns)

    def _announce(self, info: RequestInfo) -> RequestHistory:
        assert self._epoch is not None, "a request without an epoch"
        history = RequestHistory(
            self._epoch, info, info.arrival_ns + self._offset_ns, Moments(info.arrival_ns, running=self._running)
        )
        self.histories[self._epoch, info.number] = self._unfinished[info.number] = history
        return history

    def _apply_event(self, event: Event, time_ns: int) -> None:
        history = self._unfinished.get(event.number)
        if history is None:
            return
        if event.kind == "admitted":
            history.moments.started_ns = event.time_ns
        if event.kind in ENDS:
            history.moments.ended_ns = event.time_ns
            history.finish(event.kind, time_ns, cause_text(event))
        elif (phase := phase_after(event)) is not None:
            other = event.other if phase in PREEMPTED_PHASES else 0
            history.begin(phase, time_ns, cause_text(event), other)

    def _apply_rows(self, rows: RequestRows, time_ns: int, *, is_snapshot: bool = False) -> None:
        numbers, outputs = np.frombuffer(rows.number, "<u4").tolist(), _column(rows.num_output_tokens, "<u4")
        states, cached = _column(rows.state, "u1"), _column(rows.num_cached_tokens, "<u4")
        preemptions = _column(rows.num_preemptions, "<u2")
        if not len(numbers) == len(outputs) == len(states) == len(cached) == len(preemptions):
            return
        zeros = [0] * len(numbers)  # a column of zeros is left out
        drafts = _column(rows.num_draft_tokens, "<u4") or zeros
        accepted = _column(rows.num_accepted_tokens, "<u4") or zeros
        waits_for = _column(rows.waits_for, "<u4") or zeros
        if not len(drafts) == len(accepted) == len(waits_for) == len(numbers):
            drafts, accepted, waits_for = zeros, zeros, zeros
        for index, number in enumerate(numbers):
            history = self._unfinished.get(number)
            if history is None:
                continue
            history.num_draft_tokens, history.num_accepted_tokens = drafts[index], accepted[index]
            state, output = states[index], outputs[index]
            if waits_for[index] and state == RequestState.WAITING:
                history.waits_for = waits_for[index]
            if state == history.state and history.num_output_tokens and history.phase is RequestPhase.DECODE:
                history.num_output_tokens = output
                continue
            has_token = output > history.num_output_tokens
            if has_token and not history.num_output_tokens and not is_snapshot:
                history.first_token_ns = time_ns
                history.moments.first_token_ns = time_ns - self._offset_ns
            history.state, history.num_output_tokens = state, output
            history.num_cached_tokens, history.num_preemptions = cached[index], preemptions[index]
            self._derive_phase(history, time_ns, has_token)
            if history.is_ended or state == RequestState.FINISHED:
                del self._unfinished[number]

    def _derive_phase(self, history: RequestHistory, time_ns: int, has_token: bool) -> None:
        phase, state = history.phase, history.state
        if history.is_ended:
            return
        if state == RequestState.FINISHED:
            history.moments.ended_ns = time_ns - self._offset_ns
            history.finish("ended", time_ns)
        elif state == RequestState.WAITING and phase is None:
            history.begin(RequestPhase.QUEUED, history.arrival_ns)
        elif state == RequestState.PREEMPTED and phase not in PREEMPTED_PHASES:
            history.begin(RequestPhase.PREEMPTED, time_ns)
        elif state == RequestState.RUNNING and phase not in (RequestPhase.PREFILL, RequestPhase.DECODE):
            if phase is RequestPhase.QUEUED:
                history.moments.started_ns = time_ns - self._offset_ns
            history.begin(RequestPhase.DECODE if history.num_output_tokens else RequestPhase.PREFILL, time_ns)
        elif state == RequestState.RUNNING and phase is RequestPhase.PREFILL and has_token:
            history.begin(RequestPhase.DECODE, time_ns)


def read_request_histories(
    messages: Iterable[tuple[int, TelemetryMessage]], before: EventIndex | None = None
) -> list[RequestHistory]:
    """Return the requests in `messages` (log time, message), in the order they were announced."""
    reader = RequestHistoryReader(before)
    for time_ns, message in messages:
        reader.add_message(message, time_ns)
    return list(reader.histories.values())


def histories_within(histories: Iterable[RequestHistory], from_ns: int, until_ns: int) -> list[RequestHistory]:
    """Return the requests that existed at any time from `from_ns` to `until_ns`."""
    return [
        history
        for history in histories
        if history.arrival_ns <= until_ns and (history.end_ns is None or history.end_ns >= from_ns)
    ]


def _column(data: bytes, dtype: str) -> list[int]:
    column: list[int] = np.frombuffer(data, dtype).tolist()
    return column
