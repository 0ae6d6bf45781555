"""Requests and events of a report: lanes with phases, and table rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from kvscope_telemetry.exports.goodput import MissedRequest
from kvscope_telemetry.exports.phase_spans import RequestHistory
from kvscope_telemetry.exports.report.charts import (
    BOTTOM,
    LEFT,
    STOPPED_TIME_INK,
    TOP,
    ReportTimeAxis,
    frame,
    mark_lines,
    svg,
    time_range,
)
from kvscope_telemetry.exports.report.report_page import clean
from kvscope_telemetry.exports.report.worst import WorstRequest, stopped_time_note
from kvscope_telemetry.exports.span import Span
from kvscope_telemetry.messages.event_kinds import EVENT_KINDS, STOP_KINDS, cause_text, kind_text
from kvscope_telemetry.request_phase import RequestPhase
from kvscope_telemetry.summaries.run_figures import rows_in
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

_CLASSES: Final = {
    RequestPhase.QUEUED: "queued",
    RequestPhase.PREFILL: "active",
    RequestPhase.DECODE: "decoding",
    RequestPhase.PREEMPTED: "preempted",
    RequestPhase.SWAPPED: "swapped",
}
NOTABLE: Final = tuple(kind.name for kind in EVENT_KINDS if kind.is_reported)
"""Kinds of events that a report lists individually."""
_LANE: Final = 18
_MAX_PHASES: Final = 200
_MAX_TEXT: Final = 400
_MAX_LINKS: Final = 12


def request_lanes(worst: Sequence[WorstRequest], axis: ReportTimeAxis, span: Span) -> str:
    height = TOP + _LANE * len(worst) + BOTTOM
    parts = [frame(axis, height)]
    for index, each in enumerate(worst):
        y = TOP + _LANE * index
        parts.append(f'<text class="label end" x="{LEFT - 6}" y="{y + 12}">#{each.history.info.number}</text>')
        for phase in each.history.phases[:_MAX_PHASES]:
            end_ns = span.until_ns if phase.end_ns is None else phase.end_ns
            if end_ns < span.from_ns or phase.start_ns > span.until_ns:
                continue
            start_s, end_s = span.seconds(phase.start_ns), span.seconds(end_ns)
            x, x_end = axis.x(start_s), axis.x(end_s)
            length_s = each.history.length_ns(phase, span.until_ns) / 1e9
            text = f"{phase.kind.label}, {length_s:.2f} s{stopped_time_note(each.history, [phase], span.until_ns)}" + (
                f": {phase.cause}" if phase.cause else ""
            )
            parts.append(
                f'<rect class="bar {_CLASSES[phase.kind]}" x="{x:.1f}" y="{y + 2}" width="{max(x_end - x, 0.8):.1f}"'
                f' height="{_LANE - 5}"{time_range(start_s, end_s)}><title>{clean(text)}</title></rect>'
            )
        parts += _stopped_rectangles(each.history, axis, span, y)
    parts.append(mark_lines(axis, height))
    return svg(height, "Phases of these requests over time", "".join(parts))


def _stopped_rectangles(history: RequestHistory, axis: ReportTimeAxis, span: Span, y: int) -> Iterator[str]:
    end_s = span.until_s if history.end_ns is None else span.seconds(history.end_ns)
    for band in axis.bands:
        first_s, last_s = max(band.from_s, span.seconds(history.arrival_ns)), min(band.until_s, end_s)
        if first_s < last_s:
            x, width = axis.x(first_s), axis.x(last_s) - axis.x(first_s)
            place = f'x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{_LANE - 5}"{time_range(first_s, last_s)}'
            yield f'<rect class="bar {STOPPED_TIME_INK}" {place}><title>{band.html}</title></rect>'


def request_rows(worst: Sequence[WorstRequest]) -> list[list[str]]:
    rows = []
    for each in worst:
        history, info = each.history, each.history.info
        cached = (
            f"<br><span class=soft>{history.num_cached_tokens:,} cached</span>" if history.num_cached_tokens else ""
        )
        rows.append(
            [
                _request_cell(history),
                f"{each.lost_ns / 1e9:,.2f} s",
                # 0: aborted before its prompt was read.
                f"{info.num_prompt_tokens:,}{cached}" if info.num_prompt_tokens else "–",
                f"{history.num_output_tokens:,}",
                "<br>".join(clean(_shortened_text(reason, _MAX_TEXT)) for reason in _limited(each.reasons)),
            ]
        )
    return rows


def missed_rows(missed: Sequence[MissedRequest]) -> list[list[str]]:
    return [
        [
            _request_cell(each.history),
            "<br>".join(clean(text) for text in each.missed),
            "<br>".join(clean(_shortened_text(link, _MAX_TEXT)) for link in _limited(each.chain, _MAX_LINKS)),
        ]
        for each in missed
    ]


def _request_cell(history: RequestHistory) -> str:
    info = history.info
    return f"#{info.number}<br><span class=soft>{clean(_shortened_text(info.request_id, 40))}</span>"


def event_rows(overview: SessionOverview, span: Span, count: int) -> tuple[list[list[str]], int]:
    """Return the table cells of the first notable events and gaps, and their total number.

    If there are more than `count`, up to half of the rows are for stops of the engine, because they explain other
    events.
    """
    indices = overview.events.find(span.from_ns, span.until_ns, kinds=NOTABLE).tolist()
    first = [index for index in indices if overview.events[index].event.kind in STOP_KINDS][: count // 2]
    others = [index for index in indices if index not in first][: count - len(first)]
    events = [(int(overview.events.time_ns[index]), *_event_text(overview, index)) for index in (*first, *others)]
    gaps = list(_gaps(overview, span))
    rows = [
        [f"{max(0.0, span.seconds(time_ns)):,.2f} s", clean(what), clean(_shortened_text(why, _MAX_TEXT))]
        for time_ns, what, why in sorted([*events, *gaps])
    ]
    return rows[:count], len(indices) + len(gaps)


def _event_text(overview: SessionOverview, index: int) -> tuple[str, str]:
    event = overview.events[index].event
    return kind_text(event.kind) + (f" #{event.number}" if event.number else ""), cause_text(event)


def _gaps(overview: SessionOverview, span: Span) -> Iterator[tuple[int, str, str]]:
    rows = rows_in(overview, span)
    times, lost = overview.time_ns[rows].tolist(), overview.column("num_lost_frames")[rows].tolist()
    for time_ns, num_lost in zip(times, lost, strict=True):
        if num_lost:
            yield time_ns, "gap", f"{num_lost:,.0f} frames were lost in this second"
    for before_ns, after_ns in pairwise(times):
        if after_ns - before_ns > SECOND_NS:
            yield before_ns + SECOND_NS, "gap", f"not recorded for {(after_ns - before_ns) / 1e9 - 1:,.0f} s"
    for time_ns, (before, after) in zip(times[1:], pairwise(overview.epoch[rows].tolist()), strict=True):
        if before != after:
            yield time_ns, "start", "the engine was restarted"


def _limited(reasons: Sequence[str], count: int = 4) -> list[str]:
    num_omitted = len(reasons) - count
    return [*reasons[:count], *([f"and {num_omitted} times more"] if num_omitted > 0 else [])]


def _shortened_text(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
