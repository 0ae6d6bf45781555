"""Report of a range in one HTML file, to send to a colleague: summary, charts, and the most delayed requests with
causes.

Decides its contents and their order. All text from a recording is escaped. The number of points and rows is limited, so
that the file stays small for any range.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.exports.exported_bookmarks import end_of, name_of
from kvscope_telemetry.exports.goodput import GoodputReport, evaluate_goals
from kvscope_telemetry.exports.phase_spans import RequestHistory, histories_within
from kvscope_telemetry.exports.report.charts import (
    ALARM_INK,
    BOTTOM,
    LEFT,
    NOTE_INK,
    PLOT_WIDTH,
    STOP_INK,
    STOPPED_TIME_INK,
    TOP,
    Band,
    ChartLine,
    FloatArray,
    ReportMark,
    ReportTimeAxis,
    chart,
    chart_top,
    frame,
    mark_lines,
    svg,
    time_range,
)
from kvscope_telemetry.exports.report.inks import DARK, LIGHT, rgb
from kvscope_telemetry.exports.report.interaction import ChartSeries, interaction
from kvscope_telemetry.exports.report.png import png
from kvscope_telemetry.exports.report.report_page import chart_legend, clean, figure_list, page, section, table
from kvscope_telemetry.exports.report.report_requests import event_rows, missed_rows, request_lanes, request_rows
from kvscope_telemetry.exports.report.worst import worst_requests
from kvscope_telemetry.exports.requests_at_start import RequestsAtStart, requests_at_start
from kvscope_telemetry.exports.run_summary import RunSummary, summarize_run
from kvscope_telemetry.exports.span import Span
from kvscope_telemetry.exports.tables.tables import table_of_histories
from kvscope_telemetry.latencies import LATENCIES
from kvscope_telemetry.program_version import program_version
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.running_time import stop_text
from kvscope_telemetry.slo import Goals
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.run_figures import FIGURES, Figure, ends_of, pool_of, rows_in, usage_of
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

HEIGHT: Final = 250
_MAX_COLUMNS: Final = 480
_MAX_ROWS: Final = 256
_LATENCY_KEYS: Final = tuple(f"{latency.key}_p{p}_s" for latency in LATENCIES for p in (50, 95))
_UNKNOWN: Final = "unknown"
MAX_WORST: Final = 12
MAX_MISSED: Final = 40
MAX_EVENTS: Final = 40
MAX_MARKS: Final = 200
MAX_BANDS: Final = 1_000
_ALL_REQUESTS: Final = (
    '<section hidden><h2>Requests</h2>\n<div id="request-table"></div></section>'  # the script fills and shows it
)


def write_report(
    recording: Recording,
    overview: SessionOverview,
    histories: Sequence[RequestHistory],
    span: Span,
    file: BinaryIO,
    marks: Sequence[Bookmark] = (),
    goals: Goals | None = None,
) -> None:
    """Write the report of `span`. `marks` are the bookmarks and alarms of the range. With `goals`, the requests that
    missed them are listed too.
    """
    summary = summarize_run(recording, overview, span)
    axis = _axis(overview, span, marks)
    times_s, charts = _charts(overview, span)
    title = f"KV cache of {summary.model or 'an engine'}"
    body = [
        _head(title, recording, summary),
        section(
            "Summary",
            figure_list(_figures(summary)),
            _at_start_note(requests_at_start(recording, span)),
            _stops_note(overview, span),
        ),
        _bookmarks(marks, span),
        *_curves(times_s, charts, axis),
        _heatmap(overview, span, axis),
        _goals(evaluate_goals(histories, overview, recording, span, goals, MAX_MISSED)) if goals else "",
        *_requests(overview, histories, span, axis),
        _ALL_REQUESTS,
        f"<footer>Made by kvscope {clean(program_version())}. Times count from the recording's start.</footer>",
    ]
    num_bytes = sum(len(part.encode("utf-8", "replace")) for part in body)
    series = [chart for _, chart in charts]
    requests = table_of_histories(histories, recording, span)
    script, script_source = interaction(axis, times_s, series, requests, num_bytes)
    file.write(page(title, [part for part in body if part], script, script_source).encode("utf-8", "replace"))


def _head(title: str, recording: Recording, summary: RunSummary) -> str:
    start = datetime.fromtimestamp(summary.start_ns / 1e9, UTC)
    pool, seconds = summary.pool, (summary.start_ns - recording.start_ns) / 1e9
    facts = [
        f"{start:%Y-%m-%d %H:%M:%S} UTC, {summary.length_s:,.1f} s (from {seconds:,.1f} s of the recording)",
        f"{pool.num_blocks:,} blocks of {pool.block_size_tokens} tokens on {summary.device or 'an unknown device'}",
        f"allocator {pool.allocator}, prefix caching {'on' if pool.prefix_caching else 'off'}",
    ]
    notes = "".join(f'<p class="note">{clean(line)}</p>' for line in recording.damage_details.splitlines())
    return f'<h1>{clean(title)}</h1>\n<p class="soft">{clean("; ".join(facts))}</p>{notes}'


def _figures(summary: RunSummary) -> list[tuple[str, str, str]]:
    """Return name, value and secondary text of each figure. Figures that the engine does not report are left out."""

    texts = {figure.key: _text(figure, summary) for figure in FIGURES}
    texts["peak_usage_s"] = f"{summary.peak_usage_s or 0:,.0f}"
    cards = [(figure.uses.card, figure) for figure in FIGURES if figure.uses.card is not None]
    items = [
        (card.title or figure.name, card.value.format(texts[figure.key]), card.detail.format_map(texts))
        for card, figure in sorted(cards, key=lambda each: each[0].position)
    ]
    is_of_range = summary.figures["waiting_peak"] is None or None not in summary.totals.values()
    if is_of_range:  # unknown figures are due to the range, not the engine: show them
        return items
    return [(name, value, "" if _UNKNOWN in more else more) for name, value, more in items if _UNKNOWN not in value]


def _text(figure: Figure, summary: RunSummary) -> str:
    value = summary.figures[figure.key]
    if value is None:
        return _UNKNOWN
    if figure.unit == "share":
        return f"{value:.1%}"
    if figure.key in _LATENCY_KEYS:
        return ("≤ " if summary.latencies_are_bounds else "") + _time(value)
    unit = {"tokens/s": " tokens/s", "s": " s"}.get(figure.unit, "")
    return f"{value:,.0f}{unit}"


def _at_start_note(at_start: RequestsAtStart | None) -> str:
    """Return an HTML note about requests that had started before the range; "" if there were none."""
    if at_start is None or not at_start.num_started:
        return ""
    return f'<p class="note">At the start: {clean(at_start.text)} ({clean(at_start.missing_text)}).</p>'


def _stops_note(overview: SessionOverview, span: Span) -> str:
    """Return an HTML note with the times for which the engine was stopped, saying that latencies and rates
    exclude them; "" if it never was stopped.
    """
    stopped_ns = overview.stops.stopped_ns(span.from_ns, span.until_ns)
    if not stopped_ns:
        return ""
    length_by_text: dict[str, int] = {}
    for stop in overview.stops.within(span.from_ns, span.until_ns):
        length_by_text[stop_text(stop)] = length_by_text.get(stop_text(stop), 0) + stop.end_ns - stop.begin_ns
    parts = ", ".join(f"{text} for {length_ns / 1e9:,.1f} s" for text, length_ns in length_by_text.items())
    left_out = "Excluded from latencies and rates; shown as a band in the charts."
    return f'<p class="note">The engine was stopped for {stopped_ns / 1e9:,.1f} s: {clean(parts)}. {left_out}</p>'


def _bookmarks(marks: Sequence[Bookmark], span: Span) -> str:
    """Return a table of the marks with their times. The charts show them as dashed lines."""
    if not marks:
        return ""
    rows = [
        [
            f"{span.seconds(mark.time_ns):,.1f} s",
            _duration_text(mark),
            "note" if mark.is_user_note else "alarm",
            clean(name_of(mark)),
        ]
        for mark in marks[:MAX_MARKS]
    ]
    header = (("When", True), ("For", True), ("What", False), ("Text", False))
    more = f'<p class="soft">{len(marks) - len(rows):,} more are not shown.</p>' if len(marks) > len(rows) else ""
    flags = chart_legend(((NOTE_INK, "bookmarks"), (ALARM_INK, "alarms")))
    return section("Bookmarks and alarms", flags, table(header, rows), more)


def _duration_text(mark: Bookmark) -> str:
    return _time((end_of(mark) - mark.time_ns) / 1e9) if mark.until_ns > mark.time_ns else ""


def _charts(overview: SessionOverview, span: Span) -> tuple[FloatArray, list[tuple[str, ChartSeries]]]:
    """Return the times of the seconds in the range, and the title and curves of each chart that shows anything."""
    rows = rows_in(overview, span)
    times_s = (ends_of(overview, rows, span) - span.start_ns) / 1e9
    if not len(times_s):
        return times_s, []

    def values(name: str) -> FloatArray:
        return overview.column(name)[rows]

    total = np.maximum(pool_of(overview)[rows], 1)
    in_use = 100 * (values("active_blocks") + values("cached_blocks")) / total
    usage = [
        ChartLine("cached", "cached", in_use, is_area=True, value_name="held or cached"),
        ChartLine("held by requests", "active", 100 * usage_of(overview)[rows], is_area=True),
    ]
    queue = [
        ChartLine("running", "running", values("num_running")),
        ChartLine("waiting", "waiting", values("num_waiting")),
    ]
    tokens = [
        ChartLine("decode", "decode", values("decode_tokens_per_s")),
        ChartLine("prefill", "prefill", values("prefill_tokens_per_s")),
    ]
    lost = [
        ChartLine("preemptions", "preempted", values("preemptions")),
        # Not in its usual red, which would be too similar to that of preemptions.
        ChartLine("evicted blocks", "queued", values("evicted_blocks")),
        ChartLine("swapped blocks", "swapped", values("swapped_blocks")),
    ]
    slowest_s = max(np.nan_to_num(values(f"{name}_p95_s")).max() for name in ("first_token", "queued", "inter_token"))
    factor, unit_of_waits = (1.0, " s") if slowest_s >= 1 else (1e3, " ms")
    waits = [
        ChartLine("first token, p95", "first", factor * values("first_token_p95_s")),
        ChartLine("queue, p95", "queue", factor * values("queued_p95_s")),
        ChartLine("between tokens, p95", "next", factor * values("inter_token_p95_s")),
    ]
    charts = (
        ("KV usage, % of the pool", usage, "%", 100.0),
        ("Requests", queue, "", None),
        ("Tokens per second", tokens, "", None),
        ("Preemptions, evictions and swaps per second", lost, "", None),
        ("Latencies per second", waits, unit_of_waits, None),
    )
    return times_s, [
        (title, ChartSeries(lines, unit, chart_top(lines) if top is None else top))
        for title, lines, unit, top in charts
        if any(np.nan_to_num(line.values).any() for line in lines)
    ]


def _curves(times_s: FloatArray, charts: Sequence[tuple[str, ChartSeries]], axis: ReportTimeAxis) -> list[str]:
    if not len(times_s):
        return [section("Over time", '<p class="soft">There is no second of telemetry in this range.</p>')]
    return [
        section(
            title,
            _keys(each.lines, axis),
            chart(axis, times_s, each.lines, unit=each.unit, top=each.top, series=index),
        )
        for index, (title, each) in enumerate(charts)
    ]


def _heatmap(overview: SessionOverview, span: Span, axis: ReportTimeAxis) -> str:
    picture = heatmap(overview, axis, span.start_ns) if len(overview) else ""
    meaning = chart_legend((("active", "held by requests"), ("cached", "cached"), ("free", "free"), *_band_key(axis)))
    return section("Blocks by address over time", meaning, picture) if picture else ""


def _requests(
    overview: SessionOverview, histories: Sequence[RequestHistory], span: Span, axis: ReportTimeAxis
) -> list[str]:
    shown = histories_within(histories, span.from_ns, span.until_ns)
    worst = worst_requests(shown, span.until_ns, MAX_WORST)
    phases = (
        ("queued", "queued"),
        ("active", "prefill"),
        ("decoding", "decode"),
        ("preempted", "preempted"),
        ("swapped", "swapped out"),
        *([(STOPPED_TIME_INK, axis.band_name)] if axis.bands else []),
    )
    header = (("Request", False), ("Lost", True), ("Prompt", True), ("Output", True), ("Why", False))
    rows, num_events = event_rows(overview, span, MAX_EVENTS)
    more = f'<p class="soft">{num_events - len(rows):,} more are not shown.</p>' if num_events > len(rows) else ""
    return [
        section(
            "Most delayed requests",
            f'<p class="soft">Of {len(shown):,} requests, those that waited longest: queued, in a slow prefill, or '
            "preempted.</p>",
            chart_legend(phases),
            request_lanes(worst, axis, span),
            table(header, request_rows(worst)),
        )
        if worst
        else "",
        section("What happened", table((("When", True), ("What", False), ("Why", False)), rows), more) if rows else "",
    ]


def _goals(result: GoodputReport) -> str:
    more = result.num_missed - len(result.missed)
    header = (("Request", False), ("Missed", False), ("What delayed it, since its arrival", False))
    return section(
        "Latency goals",
        figure_list([("Goodput", result.share_text, result.result_text)]),
        table(header, missed_rows(result.missed)) if result.missed else "",
        f'<p class="soft">{more:,} more are not shown.</p>' if more > 0 else "",
    )


def _axis(overview: SessionOverview, span: Span, marks: Sequence[Bookmark]) -> ReportTimeAxis:
    report_marks = tuple(
        ReportMark(span.seconds(mark.time_ns), span.seconds(end_of(mark)), clean(name_of(mark)), mark.is_user_note)
        for mark in marks[:MAX_MARKS]
    )
    bands = tuple(
        Band(
            span.seconds(stop.begin_ns),
            span.seconds(stop.end_ns),
            clean(f"{stop_text(stop)}, {(stop.end_ns - stop.begin_ns) / 1e9:,.1f} s"),
        )
        for stop in overview.stops.within(span.from_ns, span.until_ns)[:MAX_BANDS]
    )
    band_name = f"engine {overview.stops.stopped_text((span.from_ns, span.until_ns))}"
    return ReportTimeAxis(span.from_s, max(span.until_s, span.from_s + 1e-3), report_marks, bands, band_name)


def _keys(lines: Sequence[ChartLine], axis: ReportTimeAxis) -> str:
    return chart_legend([*((line.css_class, line.name) for line in lines), *_band_key(axis)])


def _band_key(axis: ReportTimeAxis) -> list[tuple[str, str]]:
    return [(STOP_INK, axis.band_name)] if axis.bands else []


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"


def heatmap(overview: SessionOverview, axis: ReportTimeAxis, start_ns: int) -> str:
    """Draw the pool over time: time across, address down, colour by the use of the blocks.

    Returns an SVG with an embedded image; "" if the overview has no bins.
    """
    seconds = max(1, round(axis.until_s - axis.from_s))
    num_columns = min(_MAX_COLUMNS, seconds)
    middles = axis.from_s + (np.arange(num_columns) + 0.5) * (axis.until_s - axis.from_s) / num_columns
    indices = np.array([_second_index(overview, start_ns + round(at_s * 1e9)) for at_s in middles.tolist()], np.int64)
    active, cached = overview.bins("active", indices), overview.bins("cached", indices)
    if not active.size:
        return ""
    active, cached = _merged_bins(active), _merged_bins(cached)
    num_rows = int(overview.column("num_rows")[indices.max(initial=0)])
    height = HEIGHT - TOP - BOTTOM
    size = f'width="{PLOT_WIDTH}" height="{height}"'
    images = "".join(
        f'<image class="{css}" href="data:image/png;base64,{_encoded(_pixels(active, cached, colors))}" x="0" {size}'
        f'{time_range(axis.from_s, axis.until_s)} preserveAspectRatio="none" style="image-rendering:pixelated"/>'
        for css, colors in (("if-light", LIGHT), ("if-dark", DARK))
    )
    picture = f'<svg x="{LEFT}" y="{TOP}" {size}>{images}</svg>'  # clips the images when they are zoomed
    labels = "".join(
        f'<text class="label end" x="{LEFT - 6}" y="{y}">{text}</text>'
        for y, text in ((TOP + 10, "block 0"), (TOP + height, f"{max(0, num_rows - 1):,}"))
    )
    label = "Blocks over time, by address: held by requests, cached, free"
    return svg(HEIGHT, label, frame(axis, HEIGHT) + picture + labels + mark_lines(axis, HEIGHT))


def _second_index(overview: SessionOverview, time_ns: int) -> int:
    index = overview.index_at(time_ns)
    return index if index >= 0 and time_ns - int(overview.time_ns[index]) < 2 * SECOND_NS else -1


def _merged_bins(shares: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Merge address bins to at most `_MAX_ROWS` per time column, and scale shares to 0 to 1. Returns shape (columns,
    rows).
    """
    values = shares.astype(np.float64) / 255
    if values.shape[1] <= _MAX_ROWS:
        return values
    edges = np.arange(_MAX_ROWS) * values.shape[1] // _MAX_ROWS
    sizes = np.diff(np.append(edges, values.shape[1]))
    merged: npt.NDArray[np.float64] = np.add.reduceat(values, edges, axis=1) / sizes
    return merged


def _encoded(pixels: npt.NDArray[np.uint8]) -> str:
    return base64.b64encode(png(pixels)).decode("ascii")


def _pixels(
    active: npt.NDArray[np.float64], cached: npt.NDArray[np.float64], colors: dict[str, str]
) -> npt.NDArray[np.uint8]:
    """Return RGBA pixels: hue by the larger of the active and cached shares, opacity by their sum. Free blocks show the
    page's background.
    """
    total = np.clip(active + cached, 0, 1)
    part = np.divide(active, active + cached, out=np.zeros_like(active), where=total > 0)[..., None]
    colour = part * np.array(rgb(colors["active"])) + (1 - part) * np.array(rgb(colors["cached"]))
    pixels = np.concatenate((colour, 255 * np.sqrt(total)[..., None]), axis=2)
    rounded: npt.NDArray[np.uint8] = np.round(pixels).astype(np.uint8).transpose(1, 0, 2)
    return rounded
