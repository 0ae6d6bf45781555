"""Converts a recording to a Perfetto trace: counters, steps, bookmarks, and a track per request with its phases and
causes.

Owns the list of tracks. Open a trace at ui.perfetto.dev or with perfetto's trace processor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, Final

import numpy as np

from kvscope_telemetry.exports.exported_bookmarks import end_of, name_of
from kvscope_telemetry.exports.perfetto import packets
from kvscope_telemetry.exports.phase_spans import RequestHistory, histories_within
from kvscope_telemetry.exports.span import Span
from kvscope_telemetry.messages.event_kinds import EVENT_KINDS, cause_text, kind_text
from kvscope_telemetry.messages.model_names import short_name
from kvscope_telemetry.messages.telemetry import Frame, TelemetryMessage
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.request_phase import PREEMPTED_PHASES
from kvscope_telemetry.running_time import stop_text
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.run_figures import ends_of, peak_usage_of, rows_in, usage_of
from kvscope_telemetry.summaries.session_overview import FloatArray, SessionOverview

_ENGINE, _STEPS, _REQUESTS, _EVENTS, _MARKS, _STOPS = 1, 2, 3, 4, 5, 6
_TRACED: Final = tuple(kind.name for kind in EVENT_KINDS if kind.is_traced)
_FIRST_COUNTER: Final = 10
_FIRST_MARK: Final = 100
_FIRST_REQUEST: Final = 100_000
"""First track id of requests. The ids between `_FIRST_MARK` and this one suffice for bookmarks, of which there are at
most `MAX_BOOKMARKS`.
"""
COUNTERS: Final = (
    ("KV usage", "%", "usage"),
    ("Running", "requests", "num_running"),
    ("Waiting", "requests", "num_waiting"),
    ("Decode tokens/s", "tokens", "decode_tokens_per_s"),
    ("Prefill tokens/s", "tokens", "prefill_tokens_per_s"),
    ("Free blocks", "blocks", "free_blocks"),
    ("Cached blocks", "blocks", "cached_blocks"),
    ("Longest free run", "blocks", "longest_free_run"),
    ("Preemptions/s", "preemptions", "preemptions"),
    ("Evicted blocks/s", "blocks", "evicted_blocks"),
)
"""Name, unit and overview column of each counter track."""
_PEAKS: Final = {
    "usage": ("peak_active_ns", ""),
    "num_running": ("peak_running_ns", "peak_running"),
    "num_waiting": ("peak_waiting_ns", "peak_waiting"),
}
"""Overview columns for figures with a peak within each second: the time of the peak, and its value ("": computed by
`run_figures.peak_usage_of`).
"""


def write_perfetto(
    recording: Recording,
    overview: SessionOverview,
    histories: Sequence[RequestHistory],
    span: Span,
    file: BinaryIO,
    messages: Iterable[tuple[int, TelemetryMessage]] = (),
    marks: Sequence[Bookmark] = (),
) -> None:
    """Write a trace of `span`. Steps are drawn only if `messages` (log time, message) are given."""
    hello = recording.info.hello
    file.write(packets.clock(span.from_ns))
    name = f"{short_name(hello.model.name)} ({hello.device.kind})"
    file.write(packets.process_track(_ENGINE, name, max(hello.pid, 1)))
    parts = (
        _counters(overview, span),
        _bookmarks(marks, span),
        _events(overview, span),
        _stops(overview, span),
        _requests(histories, span),
        _steps(messages, span),
    )
    for part in parts:
        for packet in part:
            file.write(packet)


def _counters(overview: SessionOverview, span: Span) -> Iterator[bytes]:
    """Yield the counters. Levels are placed at the end of their second (`run_figures.ends_of`), sums at its start,
    because Perfetto draws a value from its time until the next one.
    """
    rows = rows_in(overview, span)
    begins, ends = np.maximum(overview.time_ns[rows], span.from_ns), ends_of(overview, rows, span)
    for index, (name, unit, column) in enumerate(COUNTERS):
        uuid = _FIRST_COUNTER + index
        values = 100 * usage_of(overview)[rows] if column == "usage" else overview.column(column)[rows]
        if values.size and np.isnan(values).all():
            continue  # the engine does not report it
        yield packets.counter_track(uuid, _ENGINE, name, unit, rank=index)
        times = begins if name.endswith("/s") else ends
        points = list(zip(times.tolist(), values.tolist(), strict=True))
        if column in _PEAKS:
            points = sorted([*points, *_peaks(overview, rows, span, values, column)])
        for time_ns, value in points:
            if value == value:
                yield packets.counter(uuid, time_ns, value)


def _peaks(
    overview: SessionOverview, rows: slice, span: Span, levels: FloatArray, column: str
) -> Iterator[tuple[int, float]]:
    """Yield time and value of the peak within each second, if it exceeds the level at the second's start or end."""
    after_name, name = _PEAKS[column]
    peaks = overview.column(name)[rows] if name else 100 * peak_usage_of(overview, rows)
    after_ns = overview.column(after_name)[rows]
    before = np.concatenate([[-np.inf], levels[:-1]])
    # A level that does not fall again within the second is drawn when it rose, not only at the second's end.
    falls, rises = (peaks > levels) & (after_ns > 0), (peaks >= levels) & (peaks > before) & (after_ns >= 0)
    for index in np.flatnonzero(falls | rises).tolist():
        time_ns = int(overview.time_ns[rows][index]) + int(after_ns[index])
        if span.from_ns <= time_ns <= span.until_ns:
            yield time_ns, float(peaks[index])


def _bookmarks(marks: Sequence[Bookmark], span: Span) -> Iterator[bytes]:
    """Yield an instant for each bookmark, and a slice for each alarm with a duration.

    Slices on one track nest, but alarms may overlap: overlapping ones go to further tracks with the same name, which
    are shown as one.
    """
    if marks:
        yield packets.track(_MARKS, _ENGINE, "Bookmarks", rank=len(COUNTERS))
    busy_until_ns: list[int] = []
    for mark in sorted(marks, key=lambda mark: mark.time_ns):
        category = "note" if mark.is_user_note else "alarm"
        values: packets.Values = {"kind": mark.kind, "text": mark.text, "lasted_s": (end_of(mark) - mark.time_ns) / 1e9}
        begin_ns = max(mark.time_ns, span.from_ns)
        yield packets.instant(_MARKS, begin_ns, name_of(mark), category, values)
        if mark.until_ns > begin_ns:
            end_ns = min(mark.until_ns, span.until_ns)
            lane = next((at for at, until_ns in enumerate(busy_until_ns) if until_ns <= begin_ns), len(busy_until_ns))
            if lane == len(busy_until_ns):
                busy_until_ns.append(0)
                yield packets.track(_FIRST_MARK + lane, _ENGINE, "Alarms", rank=len(COUNTERS), merges=True)
            busy_until_ns[lane] = end_ns
            yield packets.slice_begin(_FIRST_MARK + lane, begin_ns, name_of(mark), category, values)
            yield packets.slice_end(_FIRST_MARK + lane, end_ns)


def _events(overview: SessionOverview, span: Span) -> Iterator[bytes]:
    """Yield the events that are not drawn on the track of a request."""
    yield packets.track(_EVENTS, _ENGINE, "Events", rank=len(COUNTERS) + 1)
    for index in overview.events.find(span.from_ns, span.until_ns, kinds=_TRACED).tolist():
        timed = overview.events[index]
        values: packets.Values = {"cause": cause_text(timed.event), "blocks": timed.event.num_blocks}
        yield packets.instant(_EVENTS, timed.time_ns, kind_text(timed.event.kind), "event", values)


def _stops(overview: SessionOverview, span: Span) -> Iterator[bytes]:
    """Yield a slice for each stop of the engine. If two stops overlap, the later one is drawn from the end of the
    earlier one.
    """
    last_ns = span.from_ns
    for index, stop in enumerate(sorted(overview.stops.within(span.from_ns, span.until_ns), key=lambda s: s.begin_ns)):
        if not index:
            yield packets.track(_STOPS, _ENGINE, "Engine paused or suspended", rank=len(COUNTERS) + 2)
        begin_ns, last_ns = max(stop.begin_ns, last_ns), max(stop.end_ns, last_ns)
        if begin_ns < last_ns:
            yield packets.slice_begin(_STOPS, begin_ns, stop_text(stop), "engine", {"by": stop.by})
            yield packets.slice_end(_STOPS, last_ns)


def _requests(histories: Sequence[RequestHistory], span: Span) -> Iterator[bytes]:
    shown = histories_within(histories, span.from_ns, span.until_ns)
    uuids = {(history.epoch, history.info.number): _FIRST_REQUEST + index for index, history in enumerate(shown)}
    if shown:
        yield packets.track(_REQUESTS, _ENGINE, "Requests", rank=len(COUNTERS) + 4)
    for index, history in enumerate(shown):
        name = f"#{history.info.number} {history.info.request_id}"
        yield packets.track(_FIRST_REQUEST + index, _REQUESTS, name, rank=index)
    for history in shown:  # first: readers resolve an arrow from its start
        yield from _preemptors(history, uuids, span)
    for history in shown:
        yield from _request(history, uuids, span)


def _preemptors(history: RequestHistory, uuids: Mapping[tuple[int, int], int], span: Span) -> Iterator[bytes]:
    """Yield the starts of arrows to `history`, on the tracks of the requests that caused its preemptions."""
    for index, phase in enumerate(history.phases):
        flow = _flow(history, index, uuids, span)
        if flow:
            values = {"cause": phase.cause, "preempted": f"#{history.info.number}"}
            uuid = uuids[history.epoch, phase.preemptor_number]
            yield packets.instant(uuid, phase.start_ns, f"preempts #{history.info.number}", "request", values, flow)


def _flow(history: RequestHistory, index: int, uuids: Mapping[tuple[int, int], int], span: Span) -> int:
    phase = history.phases[index]
    is_preempted = phase.kind in PREEMPTED_PHASES
    is_available = (history.epoch, phase.preemptor_number) in uuids and span.from_ns <= phase.start_ns <= span.until_ns
    return (
        uuids[history.epoch, history.info.number] << 20 | index + 1
        if is_preempted and phase.preemptor_number and is_available
        else 0
    )


def _request(history: RequestHistory, uuids: Mapping[tuple[int, int], int], span: Span) -> Iterator[bytes]:
    info, uuid = history.info, uuids[history.epoch, history.info.number]
    facts: packets.Values = {
        "request_id": info.request_id,
        "prompt tokens": info.num_prompt_tokens,
        "cached tokens": history.num_cached_tokens,
        "output tokens": history.num_output_tokens,
        "preemptions": history.num_preemptions,
    }
    if info.adapter:
        facts = {**facts, "LoRA adapter": info.adapter}
    for index, phase in enumerate(history.phases):
        end_ns = span.until_ns if phase.end_ns is None else phase.end_ns
        begin_ns, end_ns = max(phase.start_ns, span.from_ns), min(end_ns, span.until_ns)
        if begin_ns > end_ns:
            continue
        cause_values = {"cause": phase.cause} if phase.cause else {}
        if phase.preemptor_number:
            cause_values["for request"] = f"#{phase.preemptor_number}"
        flow = _flow(history, index, uuids, span)
        yield packets.slice_begin(uuid, begin_ns, phase.kind.label, "request", {**cause_values, **facts}, flow)
        yield packets.slice_end(uuid, end_ns)
        if phase.cause and phase.start_ns >= span.from_ns:
            yield packets.instant(uuid, begin_ns, _begun_name(phase.kind.label), "request", cause_values)
    if history.first_token_ns is not None and span.from_ns <= history.first_token_ns <= span.until_ns:
        yield packets.instant(uuid, history.first_token_ns, "first token", "request", {})
    if history.end_ns is not None and history.end_ns <= span.until_ns:
        yield packets.instant(uuid, history.end_ns, history.end, "request", {"cause": history.end_reason})


def _steps(messages: Iterable[tuple[int, TelemetryMessage]], span: Span) -> Iterator[bytes]:
    """Yield a slice for each step, with its measured duration. A frame is published at the end of its step."""
    has_track = False
    last_end_ns = span.from_ns
    for time_ns, frame in messages:
        if not isinstance(frame, Frame) or not frame.batch.number or not span.from_ns <= time_ns <= span.until_ns:
            continue
        timings = frame.timings
        length_ns = timings.schedule_ns + timings.run_ns + timings.commit_ns
        begin_ns = min(max(time_ns - length_ns, last_end_ns), time_ns)
        last_end_ns = time_ns
        values = {
            "step": frame.step,
            "requests": len(frame.batch.number) // 4,
            "prefill tokens": frame.batch.num_prefill_tokens,
            "decode tokens": frame.batch.num_decode_tokens,
            "schedule_ns": timings.schedule_ns,
            "run_ns": timings.run_ns,
            "forward_ns": timings.forward_ns,
            "commit_ns": timings.commit_ns,
        }
        if not has_track:
            yield packets.track(_STEPS, _ENGINE, "Steps", rank=len(COUNTERS) + 3)
            has_track = True
        yield packets.slice_begin(_STEPS, begin_ns, _step_name(frame), "step", values)
        yield packets.slice_end(_STEPS, time_ns)


def _step_name(frame: Frame) -> str:
    prefill, decode = frame.batch.num_prefill_tokens, frame.batch.num_decode_tokens
    return "mixed" if prefill and decode else "prefill" if prefill else "decode"


def _begun_name(kind: str) -> str:
    return {"prefill": "begun", "decode": "begun"}.get(kind, kind)
