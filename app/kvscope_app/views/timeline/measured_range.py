"""Statistics of a range of the timeline: its length, activity, and the most delayed requests. Imports no Qt widgets.

`summaries.run_figures` computes the statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from kvscope_app.session.time_span import TimeSpan
from kvscope_app.ui.clock_text import clock_text
from kvscope_app.ui.number_text import UNKNOWN, count, percent, seconds, short
from kvscope_app.views.timeline.request_lanes import OPEN_NS, RequestLanes
from kvscope_telemetry.latencies import FIRST_TOKEN, INTER_TOKEN, LatencyKind
from kvscope_telemetry.request_phase import WAITING_PHASES
from kvscope_telemetry.summaries.run_figures import FIGURES, largest_of, quantile_of, rows_in
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

_LATENCIES: Final = ((FIRST_TOKEN, "First token"), (INTER_TOKEN, "Between tokens"))
_MIN_DELAY_NS: Final = 50_000_000
_MAX_DELAYED: Final = 3


@dataclass(frozen=True, slots=True)
class WholeSeconds:
    """Measured range rounded to whole seconds, at least one, because statistics are stored per second."""

    from_ns: int
    until_ns: int

    @classmethod
    def from_span(cls, span: TimeSpan) -> WholeSeconds:
        """Return `span` rounded to whole seconds at both ends. If that leaves nothing, return the second that contains
        the middle of `span`.
        """
        first, last = ((at_ns + SECOND_NS // 2) // SECOND_NS for at_ns in (span.begin_ns, span.end_ns))
        if last <= first:
            first = (span.begin_ns + span.end_ns) // 2 // SECOND_NS
            last = first + 1
        return cls(first * SECOND_NS, last * SECOND_NS - 1)


class DelayedRequest(NamedTuple):
    """Request that was queued, preempted or swapped out during the range."""

    epoch: int
    number: int
    time_ns: int
    """Start of the request's first delay in the range."""
    delay_ns: int
    """Total delay of the request in the range, without time in which the engine was paused or suspended."""

    @property
    def text(self) -> str:
        return f"#{count(self.number)}: {seconds(self.delay_ns / 1e9)}"


@dataclass(frozen=True, slots=True)
class MeasuredRange:
    title: str
    rows: tuple[tuple[str, str], ...]
    """Statistics as (name, value) pairs."""
    delayed: tuple[DelayedRequest, ...]
    note: str

    @property
    def text(self) -> str:
        lines = [self.title, *(f"{name}: {value}" for name, value in self.rows)]
        if self.delayed:
            lines.append(f"Most delayed: {', '.join(delayed.text for delayed in self.delayed)}")
        return "\n".join([*lines, self.note]) + "\n"


def measure_range(overview: SessionOverview, lanes: RequestLanes, span: TimeSpan, until_ns: int) -> MeasuredRange:
    """Return the statistics of `span`. Spans of unfinished requests are assumed to last until `until_ns`."""
    whole_seconds = WholeSeconds.from_span(span)
    first_second, end_second = _second_text(whole_seconds.from_ns), _second_text(whole_seconds.until_ns + 1)
    rows = rows_in(overview, whole_seconds)
    figures = [
        (figure.name, _text(figure.unit, figure.measure(overview, rows, whole_seconds)))
        for figure in FIGURES
        if figure.uses.in_range
    ]
    latencies = [(f"{name}, p50 / p95 / max", _latency_text(overview, latency, rows)) for latency, name in _LATENCIES]
    return MeasuredRange(
        f"{seconds(span.length_ns / 1e9)} from {clock_text(span.begin_ns)} to {clock_text(span.end_ns)}",
        (*figures, *latencies),
        tuple(most_delayed(overview, lanes, span, until_ns)),
        f"Figures of the whole seconds {first_second} to {end_second}",
    )


def most_delayed(
    overview: SessionOverview, lanes: RequestLanes, span: TimeSpan, until_ns: int
) -> Sequence[DelayedRequest]:
    """Return the requests with the longest total delay within `span`, at most `_MAX_DELAYED`, longest first."""
    spans = lanes.spans
    ends_ns = np.where(spans["end"] == OPEN_NS, max(until_ns, span.begin_ns), spans["end"]).clip(None, span.end_ns)
    begins_ns = spans["begin"].clip(span.begin_ns, None)
    indices = np.flatnonzero(np.isin(spans["phase"], WAITING_PHASES) & (begins_ns < ends_ns))
    if not indices.size:
        return []
    delays_ns = overview.stops.running_between(begins_ns[indices], ends_ns[indices])
    requests, first, request_indices = np.unique(spans["request"][indices], return_index=True, return_inverse=True)
    totals_ns = np.bincount(request_indices, delays_ns, requests.size).astype(np.int64)
    numbers, epochs = lanes.requests["number"][requests], lanes.requests["epoch"][requests]
    order = [index for index in np.lexsort((numbers, -totals_ns)).tolist() if totals_ns[index] >= _MIN_DELAY_NS]
    return [
        DelayedRequest(
            int(epochs[index]), int(numbers[index]), int(begins_ns[indices[first[index]]]), int(totals_ns[index])
        )
        for index in order[:_MAX_DELAYED]
    ]


def _latency_text(overview: SessionOverview, latency: LatencyKind, rows: slice) -> str:
    quantiles = [quantile_of(overview, latency.key, share, rows) for share in (0.5, 0.95)]
    return " / ".join(_text("s", value) for value in (*quantiles, largest_of(overview, latency.key, rows)))


def _text(unit: str, value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if unit == "s":
        return seconds(value)
    if unit == "share":
        return percent(value)
    return f"{short(value)} {unit}" if unit == "tokens/s" else count(value)


def _second_text(time_ns: int) -> str:
    return clock_text(time_ns).partition(".")[0]
