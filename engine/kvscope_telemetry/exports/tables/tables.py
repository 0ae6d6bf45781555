"""Tables of a recording: one row per second, request, event, or bookmark and alarm.

Owns their columns, types and units. Times have two columns: `..._ns` on the wall clock, and seconds of the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from kvscope_telemetry.exports.content import Content
from kvscope_telemetry.exports.exported_bookmarks import end_of, name_of
from kvscope_telemetry.exports.phase_spans import RequestHistory, histories_within
from kvscope_telemetry.exports.span import Span
from kvscope_telemetry.exports.tables.metrics_descriptions import DESCRIPTIONS
from kvscope_telemetry.exports.tables.recording_description import about
from kvscope_telemetry.exports.tables.table import Column, Table
from kvscope_telemetry.messages.event_kinds import cause_text
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.run_figures import ends_of, peak_usage_of, rows_in, usage_of
from kvscope_telemetry.summaries.session_overview import OVERVIEW_COLUMNS, SessionOverview
from kvscope_telemetry.summaries.summary import TimedEvent

_STATES: Final[dict[int, str]] = {RequestState.RUNNING: "running", RequestState.PREEMPTED: "preempted"}
_SHARES: Final = ("utilization",)
_SUFFIX_UNITS: Final = {
    "_ns": "ns",
    "_s": "s",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_blocks": "blocks",
    "_slots": "slots",
    "_watts": "W",
    "_celsius": "°C",
    "flops": "FLOP",
}
_OPTIONAL_SUFFIXES: Final = ("_above_s", "pool_blocks")
_FLOATS: Final = ("utilization", "power_watts", "temperature_celsius")
_COUNTED: Final = {
    "num_steps": "steps",
    "num_lost_frames": "frames",
    "prefill_tokens_per_s": "tokens/s",
    "decode_tokens_per_s": "tokens/s",
    "peak_running": "requests",
    "peak_waiting": "requests",
    "num_running": "requests",
    "num_waiting": "requests",
    "admitted": "requests",
    "finished": "requests",
    "aborted": "requests",
    "refused": "requests",
    "preemptions": "preemptions",
    "longest_free_run": "blocks",
    "num_free_runs": "runs",
    "num_rows": "rows",
}


def metrics_table(content: Content) -> Table:
    """Return one row per second; seconds that were not recorded have none. A row's time is the end of its second."""
    recording, overview, span = content.recording, content.overview, content.span
    rows = rows_in(overview, span)
    times = ends_of(overview, rows, span)
    columns = [
        Column("time_ns", "time", times, "ns", "end of the second, since 1970: counts are of the second before it"),
        Column("second_s", "float", (times - span.start_ns) / 1e9, "s", "the same from the recording's start"),
        Column("epoch", "int", overview.epoch[rows], "", "start of the engine"),
        Column("usage", "float", usage_of(overview)[rows], "share", "of the pool that requests held, 0 to 1"),
        Column("peak_usage", "float", peak_usage_of(overview)[rows], "share", "largest usage within the second"),
    ]
    columns += [_metric(name, overview, rows) for name in OVERVIEW_COLUMNS if _is_included(name, overview, rows)]
    columns += [
        _achieved("achieved_bytes_per_s", "moved_bytes", "bytes/s", overview, rows),
        _achieved("achieved_flops_per_s", "flops", "FLOP/s", overview, rows),
    ]
    return Table("metrics", tuple(columns), about(recording, span))


def requests_table(content: Content) -> Table:
    """Return one row per request that existed in the range, in the order they were announced."""
    return table_of_histories(content.histories(), content.recording, content.span)


def table_of_histories(all_histories: Iterable[RequestHistory], recording: Recording, span: Span) -> Table:
    """Return the same as `requests_table`, for histories that were already read."""
    histories = histories_within(all_histories, span.from_ns, span.until_ns)

    def ints(name: str, value_of: Callable[[RequestHistory], int | None], unit: str, description: str) -> Column:
        return Column(name, "int", [value_of(history) for history in histories], unit, description)

    def texts(name: str, value_of: Callable[[RequestHistory], str], description: str) -> Column:
        return Column(name, "text", [value_of(history) for history in histories], "", description)

    columns = (
        ints("number", lambda history: history.info.number, "", "counts from 1 within an engine start"),
        texts("request_id", lambda history: history.info.request_id, "id chosen by the client"),
        ints("epoch", lambda history: history.epoch, "", "start of the engine"),
        ints("index", lambda history: history.info.index, "", "index among the n completions of a prompt"),
        ints("priority", lambda history: history.info.priority, "", "priority that the client requested"),
        texts("adapter", lambda history: history.info.adapter, "LoRA adapter"),
        Column("arrival_time_ns", "time", [history.arrival_ns for history in histories], "ns", "since 1970"),
        Column(
            "arrival_s",
            "float",
            np.array([span.seconds(history.arrival_ns) for history in histories], np.float64),
            "s",
            "the same from the recording's start; negative: before it",
        ),
        ints(
            "num_prompt_tokens",
            lambda history: history.info.num_prompt_tokens or None,
            "tokens",
            "of the prompt; none if the request was aborted before its prompt was read",
        ),
        ints(
            "num_cached_tokens", lambda history: history.num_cached_tokens, "tokens", "of these, from the prefix cache"
        ),
        ints(
            "num_output_tokens",
            lambda history: history.num_output_tokens,
            "tokens",
            "generated until the end of the request or of the range",
        ),
        ints("max_tokens", lambda history: history.info.max_tokens, "tokens", "maximum new tokens"),
        ints("num_preemptions", lambda history: history.num_preemptions, "preemptions", "number of preemptions"),
        ints("num_draft_tokens", lambda history: history.num_draft_tokens, "tokens", "draft tokens checked"),
        ints("num_accepted_tokens", lambda history: history.num_accepted_tokens, "tokens", "draft tokens accepted"),
        ints("queue_ns", lambda history: history.moments.queue_ns, "ns", "from arrival until it first ran"),
        ints("first_token_ns", lambda history: history.moments.ttft_ns, "ns", "from arrival to its first token"),
        ints("preempted_ns", lambda history: history.preempted_ns(span.until_ns), "ns", "time preempted, in total"),
        ints("total_ns", lambda history: history.moments.total_ns, "ns", "from arrival to its end"),
        ints(
            "stopped_ns",
            lambda history: history.total_stopped_ns(span.until_ns),
            "ns",
            "time paused or suspended, excluded from the durations",
        ),
        texts("state", _state, "at the end of the range"),
        texts("end_reason", lambda history: history.end_reason, "reason for the end, as text; empty if unknown"),
    )
    return Table("requests", columns, about(recording, span))


def events_table(content: Content) -> Table:
    recording, overview, span = content.recording, content.overview, content.span
    indices = overview.events.find(span.from_ns, span.until_ns).tolist()
    events = [overview.events[index] for index in indices]

    def ints(name: str, value_of: Callable[[TimedEvent], int], unit: str, description: str) -> Column:
        return Column(name, "int", [value_of(timed) for timed in events], unit, description)

    times = np.array([timed.time_ns for timed in events], np.int64)
    columns = (
        Column("time_ns", "time", times, "ns", "since 1970"),
        Column("second_s", "float", (times - span.start_ns) / 1e9, "s", "the same from the recording's start"),
        ints("epoch", lambda timed: timed.epoch, "", "start of the engine"),
        Column("kind", "text", [timed.event.kind for timed in events], "", "kind of event"),
        ints("number", lambda timed: timed.event.number, "", "number of the request; 0 for none"),
        ints("other", lambda timed: timed.event.other, "", "number of the request that caused the event; 0 for none"),
        ints("num_blocks", lambda timed: timed.event.num_blocks, "blocks", "number of blocks concerned"),
        ints("num_tokens", lambda timed: timed.event.num_tokens, "tokens", "number of tokens concerned"),
        Column("cause", "text", [cause_text(timed.event) for timed in events], "", "cause as text"),
    )
    return Table("events", columns, about(recording, span))


def bookmarks_table(content: Content) -> Table:
    recording, marks, span = content.recording, content.marks, content.span
    times = np.array([mark.time_ns for mark in marks], np.int64)
    lengths = np.array([end_of(mark) - mark.time_ns for mark in marks], np.float64) / 1e9
    columns = (
        Column("time_ns", "time", times, "ns", "since 1970"),
        Column("second_s", "float", (times - span.start_ns) / 1e9, "s", "the same from the recording's start"),
        Column("length_s", "float", lengths, "s", "duration; 0 for a moment"),
        Column(
            "kind",
            "text",
            [mark.kind for mark in marks],
            "",
            "note for a user's bookmark, otherwise the name of the alarm",
        ),
        Column("name", "text", [name_of(mark) for mark in marks], "", "title"),
        Column("text", "text", [mark.text for mark in marks], "", "text of the user, or worst value of the alarm"),
        Column(
            "bookmark_id", "text", [mark.bookmark_id for mark in marks], "", "id of the bookmark, equal in all copies"
        ),
    )
    return Table("bookmarks", columns, about(recording, span))


def unit_of(name: str) -> str:
    if name in _SHARES:
        return "share"
    return _COUNTED.get(name) or next((unit for end, unit in _SUFFIX_UNITS.items() if name.endswith(end)), "")


def _is_included(name: str, overview: SessionOverview, rows: slice) -> bool:
    """Whether to include a metrics column. A column with one of `_OPTIONAL_SUFFIXES`, which only some engines fill, is
    left out if it is empty.
    """
    return not name.endswith(_OPTIONAL_SUFFIXES) or bool(np.isfinite(overview.column(name)[rows]).any())


def _achieved(name: str, done: str, unit: str, overview: SessionOverview, rows: slice) -> Column:
    amounts, forward_ns = overview.column(done)[rows], overview.column("forward_ns")[rows]
    is_known = (amounts > 0) & (forward_ns > 0)
    values = np.where(is_known, amounts * 1e9 / np.where(is_known, forward_ns, 1.0), np.nan)
    return Column(name, "float", values, unit, f"{done} over forward_ns")


def _metric(name: str, overview: SessionOverview, rows: slice) -> Column:
    values, description = overview.column(name)[rows], DESCRIPTIONS.get(name, "")
    if name.endswith("_s") or name in _FLOATS:
        return Column(name, "float", values, unit_of(name), description)
    if np.isnan(values).any():
        known = [None if np.isnan(value) else int(value) for value in values.tolist()]
        return Column(name, "int", known, unit_of(name), description)
    return Column(name, "int", values.astype(np.int64), unit_of(name), description)


def _state(history: RequestHistory) -> str:
    if history.is_ended:
        return history.end
    return _STATES.get(history.state, "waiting")
