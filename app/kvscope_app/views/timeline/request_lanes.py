"""Requests as spans of time, built incrementally from an overview's events and packed into rows.

Owns the spans and the row of each request. Imports no Qt and draws nothing. Arrivals and the ends of prefills are
reported by the phase changes in the per-second summaries, which arrive slightly later than the events. Without phase
changes, a request's waiting time appears only once the request runs, and its running time is not split into prefill and
decode. A request whose end was lost stays open until its engine ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.request_phase import RequestPhase, phase_after
from kvscope_telemetry.summaries.summary import TimedEvent

OPEN_NS: Final = 1 << 62
"""End time in ns of a span that has not ended."""


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """Phase change of a request that no event reports, taken from the per-second summaries."""

    time_ns: int
    epoch: int
    number: int
    kind: RequestPhase


class RequestLanes:
    """Spans of requests. Events must be added in order.

    `requests` has a row per request. Its column `newest` is the index of the request's last span in `spans`. The column
    `before` of `spans` is the index of the same request's previous span, -1 for the first.
    """

    def __init__(self) -> None:
        self.spans = GrowingColumns(
            {"begin": np.int64, "end": np.int64, "phase": np.uint8, "request": np.int64, "before": np.int64}
        )
        self.requests = GrowingColumns(
            {
                "begin": np.int64,
                "end": np.int64,
                "row": np.int64,
                "number": np.int64,
                "epoch": np.int64,
                "newest": np.int64,
            }
        )
        self.has_phases = False
        """Whether phase changes are available. If so, an admitted request is in prefill until a phase change reports
        its end.
        """
        self.version = 0
        self._open_requests: dict[int, int] = {}
        """Index in `requests` of each unfinished request of the current epoch, by number."""
        self._index_by_request: dict[tuple[int, int], int] = {}
        """Index in `requests` of the newest request with each (epoch, number)."""
        self._epoch: int | None = None
        self._row_ends = np.full(64, -1, np.int64)

    def add_events(self, events: Iterable[TimedEvent | PhaseChange], known_since_ns: int = 0) -> None:
        """Add events and phase changes, in order. A span whose start time is unknown begins at `known_since_ns`."""
        for event in events:
            if isinstance(event, PhaseChange):
                self._add_phase(event)
                continue
            if event.epoch != self._epoch:
                self.end_epoch(event.time_ns)
                self._epoch = event.epoch
            handler = _HANDLERS.get(event.event.kind)
            if handler is not None and event.event.number:
                handler(self, event.event, event.time_ns, known_since_ns)
                self.version += 1

    def end_epoch(self, time_ns: int) -> None:
        for number in list(self._open_requests):
            self._close_request(number, time_ns)
        self._epoch = None
        self.version += 1

    @property
    def epoch(self) -> int | None:
        """Epoch of the newest event; None after `end_epoch`."""
        return self._epoch

    def drop_before(self, time_ns: int) -> None:
        """Drop requests that ended before `time_ns`, once enough have accumulated."""
        is_kept = self.requests["end"] >= time_ns
        if is_kept.size - np.count_nonzero(is_kept) <= max(256, is_kept.size // 4):
            return
        new_request = np.cumsum(is_kept) - 1
        is_span_kept = is_kept[self.spans["request"]]
        new_span = np.cumsum(is_span_kept) - 1
        self.spans.filter(is_span_kept)
        self.spans["request"][:] = new_request[self.spans["request"]]
        before = self.spans["before"]
        before[:] = np.where(before < 0, -1, new_span[before])
        self.requests.filter(is_kept)
        self.requests["newest"][:] = new_span[self.requests["newest"]]
        self._open_requests = {number: int(new_request[request]) for number, request in self._open_requests.items()}
        self._index_by_request = {
            key: int(new_request[request]) for key, request in self._index_by_request.items() if is_kept[request]
        }
        self.version += 1

    def index_of(self, epoch: int, number: int) -> int | None:
        return self._index_by_request.get((epoch, number))

    def _add_phase(self, phase: PhaseChange) -> None:
        """Add a phase change. For a known request only the end of its prefill is used, because events report all other
        changes.
        """
        request = self._index_by_request.get((phase.epoch, phase.number))
        if request is not None:
            if phase.kind is RequestPhase.DECODE:
                self._split(request, phase.time_ns)
            return
        if self._epoch is None:
            self._epoch = phase.epoch
        if phase.epoch == self._epoch:
            self._open_request(phase.number, phase.kind, phase.time_ns)
            self.version += 1

    def _split(self, request: int, time_ns: int) -> None:
        """Split the request's span at `time_ns` into prefill and decode. The span may have ended."""
        spans, later_span = self.spans, -1
        index = int(self.requests["newest"][request])
        while index >= 0 and spans["begin"][index] > time_ns:
            later_span, index = index, int(spans["before"][index])
        if index < 0 or RequestPhase(int(spans["phase"][index])) not in (RequestPhase.RUNNING, RequestPhase.PREFILL):
            return
        spans["phase"][index] = RequestPhase.PREFILL
        if spans["end"][index] <= time_ns:
            return
        decode_span = spans.append(time_ns, int(spans["end"][index]), RequestPhase.DECODE, request, index)
        spans["end"][index] = time_ns
        if later_span >= 0:
            spans["before"][later_span] = decode_span
        else:
            self.requests["newest"][request] = decode_span
        self.version += 1

    def _on_admitted(self, event: Event, time_ns: int, _: int) -> None:
        waited_ns = event.data.waited_ns + event.data.stopped_ns if event.data is not None else 0
        if event.number in self._open_requests:
            self._change_phase(event.number, self._running_phase(event), time_ns)
            return
        begin_ns = max(0, time_ns - max(waited_ns, 0))
        first_phase = RequestPhase.QUEUED if begin_ns < time_ns else self._running_phase(event)
        self._open_request(event.number, first_phase, begin_ns)
        if begin_ns < time_ns:
            self._change_phase(event.number, self._running_phase(event), time_ns)

    def _on_preempted(self, event: Event, time_ns: int, since_ns: int) -> None:
        self._ensure_open(event.number, RequestPhase.RUNNING, min(since_ns, time_ns))
        self._change_phase(event.number, phase_after(event) or RequestPhase.PREEMPTED, time_ns)

    def _on_resumed(self, event: Event, time_ns: int, since_ns: int) -> None:
        self._ensure_open(event.number, RequestPhase.PREEMPTED, min(since_ns, time_ns))
        self._change_phase(event.number, self._running_phase(event), time_ns)

    def _on_finished(self, event: Event, time_ns: int, since_ns: int) -> None:
        self._ensure_open(event.number, RequestPhase.RUNNING, min(since_ns, time_ns))
        self._close_request(event.number, time_ns)

    def _on_aborted(self, event: Event, time_ns: int, _: int) -> None:
        """End the request with a mark of zero length for the abort. A request that never ran consists of this
        mark only.
        """
        self._add_mark(event.number, RequestPhase.ABORTED, time_ns)

    def _on_refused(self, event: Event, time_ns: int, _: int) -> None:
        self._add_mark(event.number, RequestPhase.REFUSED, time_ns)

    def _add_mark(self, number: int, phase: RequestPhase, time_ns: int) -> None:
        if number in self._open_requests:
            self._change_phase(number, phase, time_ns)
        else:
            self._open_request(number, phase, time_ns)
        self._close_request(number, time_ns)

    def _ensure_open(self, number: int, phase: RequestPhase, begin_ns: int) -> None:
        if number not in self._open_requests:
            self._open_request(number, phase, begin_ns)

    def _running_phase(self, event: Event) -> RequestPhase:
        phase = phase_after(event) if self.has_phases else None
        return RequestPhase.RUNNING if phase is None else phase

    def _open_request(self, number: int, phase: RequestPhase, time_ns: int) -> None:
        row, epoch = self._free_row(time_ns), self._epoch or 0
        request = self.requests.append(time_ns, OPEN_NS, row, number, epoch, len(self.spans))
        self.spans.append(time_ns, OPEN_NS, phase, request, -1)
        self._open_requests[number] = self._index_by_request[epoch, number] = request

    def _change_phase(self, number: int, phase: RequestPhase, time_ns: int) -> None:
        request = self._open_requests[number]
        span = int(self.requests["newest"][request])
        time_ns = self._close_span(span, time_ns)
        self.requests["newest"][request] = self.spans.append(time_ns, OPEN_NS, phase, request, span)

    def _close_request(self, number: int, time_ns: int) -> None:
        request = self._open_requests.pop(number)
        time_ns = self._close_span(int(self.requests["newest"][request]), time_ns)
        self.requests["end"][request] = time_ns
        self._row_ends[self.requests["row"][request]] = time_ns

    def _close_span(self, span: int, time_ns: int) -> int:
        """End a span at `time_ns`, but not before its start, in case the event is late. Returns the end time."""
        time_ns = max(time_ns, int(self.spans["begin"][span]))
        self.spans["end"][span] = time_ns
        return time_ns

    def _free_row(self, time_ns: int) -> int:
        """Reserve the first row that is free after `time_ns`, and return it. A request that ends at `time_ns` occupies
        its row until then, so that marks of zero length do not overlap.
        """
        free = np.flatnonzero(self._row_ends < time_ns)
        if not free.size:
            free = np.array([self._row_ends.size])
            self._row_ends = np.concatenate((self._row_ends, np.full_like(self._row_ends, -1)))
        row = int(free[0])
        self._row_ends[row] = OPEN_NS
        return row


_HANDLERS: Final = {
    "admitted": RequestLanes._on_admitted,
    "preempted": RequestLanes._on_preempted,
    "resumed": RequestLanes._on_resumed,
    "finished": RequestLanes._on_finished,
    "aborted": RequestLanes._on_aborted,
    "refused": RequestLanes._on_refused,
}


class GrowingColumns:
    """Named numpy columns of equal length n that grow by appending rows. Reading a column returns an array of shape
    (n,).
    """

    def __init__(self, dtypes: Mapping[str, type[np.generic]]) -> None:
        self._size = 0
        self._columns: dict[str, npt.NDArray[Any]] = {name: np.empty(64, dtype) for name, dtype in dtypes.items()}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._columns[name][: self._size]

    def append(self, *values: int) -> int:
        index = self._size
        if index == next(iter(self._columns.values())).size:
            self._columns = {name: np.concatenate((c, np.empty_like(c))) for name, c in self._columns.items()}
        for column, value in zip(self._columns.values(), values, strict=True):
            column[index] = value
        self._size += 1
        return index

    def filter(self, mask: npt.NDArray[np.bool_]) -> None:
        self._size = int(np.count_nonzero(mask))
        for name, column in self._columns.items():
            kept_values = column[: mask.size][mask]
            self._columns[name] = np.concatenate((kept_values, np.empty(max(64, kept_values.size // 2), column.dtype)))
