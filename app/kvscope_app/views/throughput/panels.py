"""Panels of the throughput view: their curves in a window of the history, and their headline values at the shown time.

Owns the list of panels; `chart.panel` provides the widgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

import numpy as np

from kvscope_app.session.history import HISTOGRAMS, HistoryWindow
from kvscope_app.session.recent_figures import RECENT_S, recent_latency, recent_rate, recent_sums
from kvscope_app.session.session import Session
from kvscope_app.ui.number_text import NOTHING, percent, plural, seconds, short
from kvscope_app.views.chart.curves import FloatArray, nearest_index, trailing_mean
from kvscope_app.views.chart.panel import ChartPanel, CurveSpec, PlotMark
from kvscope_app.views.chart.peak_line import CurvePeak
from kvscope_telemetry.latencies import FIRST_TOKEN, INTER_TOKEN, QUEUED
from kvscope_telemetry.messages.event_kinds import cause_text
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.summaries.histograms import PercentileBounds
from kvscope_telemetry.summaries.run_figures import ACCEPTED, BY_KEY, HIT_RATE, USAGE
from kvscope_telemetry.summaries.summary import SECOND_NS, TimedEvent

MAX_MARKED_EVENTS: Final = 2000
_MAX_MARKS: Final = 80
"""Maximum number of event marks across the visible time. Preemptions closer together than that allows share a mark."""
_MAX_NAMED_PER_MARK: Final = 4
_JOIN_LATENCIES_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class PanelSpec:
    key: str
    title: str
    curves: tuple[CurveSpec, ...]
    axis_text: Callable[[float], str]
    value_text: Callable[[float], str]
    top: float | None = None
    join_gap_s: float = 0.0
    peak_first: str = ""
    """Name of the curve whose maximum is shown first, or "" for the first curve."""
    needs: str = ""
    """History column without which the panel is not shown, because not every source has it, or "" if the panel is
    always shown.
    """
    tip: str = ""

    def make_panel(self) -> ChartPanel:
        panel = ChartPanel(self.title, self.curves, self.axis_text, top=self.top, join_gap_s=self.join_gap_s)
        panel.legend.explain(self.tip)
        panel.show_peaks(())
        return panel


@dataclass(slots=True)
class DrawnPanel:
    """Data of a panel: times in seconds of the monotonic clock, and values by curve name, shape (n,) each."""

    time_s: FloatArray
    values: dict[str, FloatArray] = field(default_factory=dict)
    prefix: str = ""
    """Text before each value: `≤ ` if the values are upper bounds, else ""."""


def _tokens(value: float) -> str:
    return NOTHING if not np.isfinite(value) else f"{short(value)} tok/s"


def _blocks(value: float) -> str:
    return NOTHING if not np.isfinite(value) else f"{short(value)}/s"


def _axis_seconds(value: float) -> str:
    """Format seconds as decimals, because text such as `2:30 min` would be too wide for an axis."""
    return seconds(value) if value < 60 else f"{value:.0f} s" if value < 1000 else f"{value / 60:.0f} min"


def _whole_number(value: float) -> str:
    return NOTHING if not np.isfinite(value) else short(round(value))


def _share(value: float) -> str:
    return NOTHING if not np.isfinite(value) else percent(value)


def _watts(value: float) -> str:
    return NOTHING if not np.isfinite(value) else f"{value:.0f} W"


def _celsius(value: float) -> str:
    return NOTHING if not np.isfinite(value) else f"{value:.0f} °C"


PANELS: Final = (
    PanelSpec(
        "tokens",
        "Tokens",
        (CurveSpec("all_tokens", "", 1),),
        short,
        _tokens,
        tip="Tokens computed per second: of prompts (prefill) and of answers (decode).",
    ),
    PanelSpec("decode", "Decode", (CurveSpec("decode_tokens", "", 2),), short, _tokens),
    PanelSpec("prefill", "Prefill", (CurveSpec("prefill_tokens", "", 0),), short, _tokens),
    PanelSpec(
        "requests",
        "Requests",
        (CurveSpec("num_running", "running", 2), CurveSpec("num_waiting", "waiting", 5)),
        short,
        _whole_number,
    ),
    PanelSpec(
        "kv",
        "KV cache",
        (
            CurveSpec("cached", "cached", "block_cached", filled=True),
            CurveSpec("active", "in use", "block_active", filled=True),
        ),
        lambda value: percent(value, 0),
        _share,
        top=1.0,
        peak_first="active",
    ),
    PanelSpec(
        "ttft",
        FIRST_TOKEN.name,
        (CurveSpec("ttft_p50_s", "p50", 6), CurveSpec("ttft_p95_s", "p95", 3)),
        _axis_seconds,
        seconds,
        join_gap_s=_JOIN_LATENCIES_S,
        peak_first="ttft_p95_s",
        tip=f"{FIRST_TOKEN.counts}.",
    ),
    PanelSpec(
        "queue",
        QUEUED.name,
        (CurveSpec("queue_p50_s", "p50", 6), CurveSpec("queue_p95_s", "p95", 3)),
        _axis_seconds,
        seconds,
        join_gap_s=_JOIN_LATENCIES_S,
        peak_first="queue_p95_s",
        needs="queue_p50_s",
        tip=f"{QUEUED.counts}.",
    ),
    PanelSpec(
        "itl",
        INTER_TOKEN.name,
        (CurveSpec("itl_p50_s", "p50", 6), CurveSpec("itl_p95_s", "p95", 3)),
        seconds,
        seconds,
        join_gap_s=_JOIN_LATENCIES_S,
        peak_first="itl_p95_s",
    ),
    PanelSpec(
        "step",
        "Step",
        (
            CurveSpec("schedule_s", "schedule", 2),
            CurveSpec("forward_s", "forward", 0),
            CurveSpec("rest_s", "run", 1),
            CurveSpec("commit_s", "commit", 5),
        ),
        seconds,
        seconds,
        join_gap_s=_JOIN_LATENCIES_S,
        needs="run_ns",
        tip="Average step time by part. Schedule: choosing requests and blocks. Forward: the model. Run: "
        "inputs, sampling and other device work, including the model if the engine does not report it separately. "
        "Commit: storing and reporting results.",
    ),
    PanelSpec(
        "hits",
        BY_KEY["hit_rate"].name,
        (CurveSpec("hit_share", "", "block_cached"),),
        lambda value: percent(value, 0),
        _share,
        top=1.0,
        join_gap_s=_JOIN_LATENCIES_S,
        needs="cached_tokens",
        tip=f"{BY_KEY['hit_rate'].counts}.",
    ),
    PanelSpec(
        "drafts",
        "Draft acceptance",
        (CurveSpec("draft_share", "", 6),),
        lambda value: percent(value, 0),
        _share,
        top=1.0,
        join_gap_s=_JOIN_LATENCIES_S,
        needs="draft_tokens",
        tip="Speculation: share of draft tokens that the model accepted.",
    ),
    PanelSpec(
        "evicted",
        "Blocks evicted",
        (CurveSpec("evicted_blocks", "", "flash_evicted"),),
        short,
        _blocks,
        needs="evicted_blocks",
        tip="Cached blocks reused for other tokens.",
    ),
    PanelSpec(
        "copied",
        "Copied on write",
        (CurveSpec("copied_blocks", "", "flash_copied"),),
        short,
        _blocks,
        needs="copied_blocks",
        tip="Copies of shared blocks made before a write.",
    ),
    PanelSpec(
        "busy",
        "Device utilization",
        (CurveSpec("utilization", "", 4),),
        lambda value: percent(value, 0),
        _share,
        top=1.0,
        needs="utilization",
        tip="GPU: share of time it computes. CPU: the engine's share of all cores; without an engine, all use.",
    ),
    PanelSpec("power", "Power", (CurveSpec("power_watts", "", 3),), short, _watts, needs="power_watts"),
    PanelSpec(
        "temperature",
        "Temperature",
        (CurveSpec("temperature_celsius", "", 5),),
        lambda value: f"{value:.0f} °",
        _celsius,
        needs="temperature_celsius",
        tip="As reported by the driver.",
    ),
)
_RATES: Final = {
    "tokens": ("prefill_tokens", "decode_tokens"),
    "decode": ("decode_tokens",),
    "prefill": ("prefill_tokens",),
    "evicted": ("evicted_blocks",),
    "copied": ("copied_blocks",),
}
"""Names of history columns by panel key. The curve of each of these panels is the sum of the columns, per second."""
_SHARES: Final = {"hits": ("hit_share", HIT_RATE), "drafts": ("draft_share", ACCEPTED)}
"""Curve name and ratio of each panel that shows a ratio, by panel key."""
SAMPLE_GAUGES_OF: Final = {"busy": "utilization", "power": "power_watts", "temperature": "temperature_celsius"}
PEAK_COLUMNS: Final = {
    "num_running": ("peak_running", "peak_running_ns"),
    "num_waiting": ("peak_waiting", "peak_waiting_ns"),
    "blocks_active": ("peak_active_blocks", "peak_active_ns"),
}
"""Overview columns by name of a gauge: the gauge's maximum within each second, and the time when it was first
reached.
"""
_PEAK_MARGIN_S: Final = 1e-6
"""Seconds added to the time of a peak, so that rounding does not exclude the frame that reports it."""
_PHASES: Final = ("schedule_ns", "run_ns", "forward_ns", "commit_ns", "record_ns")
_BY_KEY: Final = {spec.key: spec for spec in PANELS}


def columns_of(keys: Iterable[str]) -> set[str]:
    """Return the history columns that the panels need, and `num_running`, which identifies times without data."""
    blocks = {"blocks_active", "blocks_cached", "blocks_free"}
    columns = {"kv": blocks, "step": set(_PHASES)}
    columns |= {key: set(share.names()) for key, (_, share) in _SHARES.items()}
    columns |= {key: set(names) for key, names in _RATES.items()}
    curves = (columns.get(key) or {curve.name for curve in _BY_KEY[key].curves} for key in keys)
    return {"num_steps", "num_running"}.union(*curves)


def draw(panel: ChartPanel, key: str, window: HistoryWindow, session: Session) -> DrawnPanel:
    curves = _curves(key, window)
    last = (
        -1 if not window.is_complete and window.end_ns >= session.timeline.shown_monotonic_ns - window.bin_ns else None
    )
    time_s = (window.time_s + window.end_ns / 1e9)[:last]
    is_bound = key in HISTOGRAMS and not session.capabilities.latencies
    prefix = "≤ " if is_bound else ""
    drawn = DrawnPanel(time_s, prefix=prefix, values={name: values[:last] for name, values in curves.items()})
    phase = int(window.end_ns // window.bin_ns) - len(window.time_s) + 1
    highest = [panel.show_curve(name, time_s, _stacked(key, name, drawn.values), phase) for name in drawn.values]
    panel.fit(max(highest))
    return drawn


def is_current(key: str) -> bool:
    """Whether the headline of panel `key` is the value at the shown time. All other headlines cover the last `RECENT_S`
    seconds.
    """
    return key in ("requests", "kv", *SAMPLE_GAUGES_OF)


def headline(key: str, session: Session) -> dict[str, str]:
    """Return the headline text of each curve of panel `key`. It does not depend on the visible time range."""
    if key in HISTOGRAMS:
        return _headline_latencies(key, session)
    if key in _RATES:
        values = {_BY_KEY[key].curves[0].name: sum(recent_rate(session, name) for name in _RATES[key])}
    elif key in _SHARES:
        name, share = _SHARES[key]
        values = {name: _nan_if_none(share.of(recent_sums(session, share.names())[0]))}
    elif key == "step":
        sums, _ = recent_sums(session, ("num_steps", *_PHASES))
        values = {name: float(parts) for name, parts in _mean_phases({n: np.array(v) for n, v in sums.items()}).items()}
    elif key == "requests":
        counters, has_state = session.mirror.counters, session.mirror.hello is not None
        levels = {"num_running": counters.num_running, "num_waiting": counters.num_waiting}
        values = {name: float(level) if has_state else np.nan for name, level in levels.items()}
    elif key == "kv":
        values = _pool_shares(session.mirror)
    else:
        sample, name = session.history.newest_sample, SAMPLE_GAUGES_OF[key]
        value = -1.0 if sample is None else getattr(sample, name)
        values = {name: value if value >= 0 else np.nan}
    text = _BY_KEY[key].value_text
    return {name: text(value) for name, value in values.items()}


def is_constant(window: HistoryWindow) -> bool:
    """Whether all columns are constant, apart from the newest second, which may be incomplete."""
    complete = [column[: -1_000_000_000 // window.bin_ns] for column in window.columns.values()]
    return all(column.size > 0 and bool((column == column[0]).all() or np.isnan(column).all()) for column in complete)


def values_at(key: str, drawn: DrawnPanel, x: float) -> dict[str, str]:
    if not drawn.time_s.size:
        return {}
    index = nearest_index(drawn.time_s, x)
    texts = {name: _BY_KEY[key].value_text(float(values[index])) for name, values in drawn.values.items()}
    return {name: text if text == NOTHING else f"{drawn.prefix}{text}" for name, text in texts.items()}


def peaks_of(
    key: str, drawn: DrawnPanel, window: HistoryWindow, span: tuple[float, float], clock_text: Callable[[float], str]
) -> list[CurvePeak]:
    """Return the maximum of each curve in `span`, a range of seconds. The curve `PanelSpec.peak_first` comes first.

    If the window is from an overview, the maximum of a gauge within each second is used, not the value at the second's
    end.
    """
    first_s, last_s = span
    spec, peaks = _BY_KEY[key], []
    for curve in sorted(spec.curves, key=lambda curve: curve.name != spec.peak_first):
        values, times_s = _highest_in_bins(key, curve.name, drawn, window)
        is_shown = (values > 0) & (times_s >= first_s) & (times_s <= last_s + _PEAK_MARGIN_S)
        if is_shown.any():
            index = int(np.argmax(np.where(is_shown, values, 0.0)))
            text = f"{curve.label} {drawn.prefix}{spec.value_text(float(values[index]))}".strip()
            peaks.append(CurvePeak(float(times_s[index]), f"{text} at {clock_text(float(times_s[index]))}"))
    return peaks


def marks_of_overview(window: HistoryWindow, first_s: float, last_s: float) -> list[PlotMark]:
    """Return marks with the number of preemptions per second, for data without single events."""
    counts = np.nan_to_num(window.columns["preemptions"])
    indices = np.flatnonzero(counts)
    times_s = (window.time_s + window.end_ns / 1e9)[indices]
    groups = (times_s // max((last_s - first_s) / _MAX_MARKS, 1e-9)).astype(np.int64)
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    sums = np.add.reduceat(counts[indices], starts) if starts.size else np.empty(0)
    return [
        PlotMark(float(x), plural(round(number), "preemption")) for x, number in zip(times_s[starts], sums, strict=True)
    ]


def preemption_marks(events: Iterable[TimedEvent], wall_ns: int, first_s: float, last_s: float) -> list[PlotMark]:
    """Return marks of single preemptions between `first_s` and `last_s`, oldest first, with request and cause.

    `wall_ns` is the offset in ns from the events' times to the chart's wall-clock times.
    """
    # Groups have absolute times, so that marks stay stable as the window moves.
    width_ns = max(int((last_s - first_s) * 1e9) // _MAX_MARKS, 1)
    groups = groupby(events, key=lambda timed: (timed.time_ns - wall_ns) // width_ns)
    return [_mark(list(group), wall_ns) for _, group in groups]


def _mark(events: list[TimedEvent], wall_ns: int) -> PlotMark:
    lines = [f"Request {e.event.number} preempted: {cause_text(e.event)}" for e in events[:_MAX_NAMED_PER_MARK]]
    num_more = len(events) - len(lines)
    text = "\n".join([*lines, f"and {num_more} more"] if num_more else lines)
    return PlotMark((events[0].time_ns - wall_ns) / 1e9, text, events[0])


def _highest_in_bins(key: str, name: str, drawn: DrawnPanel, window: HistoryWindow) -> tuple[FloatArray, FloatArray]:
    """Return the maximum of a curve in each bin, and the second when it was first reached, shape (n,) each."""
    column = "blocks_active" if key == "kv" and name == "active" else name
    values, peak_names = drawn.values[name], PEAK_COLUMNS.get(column, ())
    if not peak_names or not window.columns.keys() >= {*peak_names}:
        return values, drawn.time_s
    highest, reached_ns = (window.columns[each] for each in peak_names)
    if key == "kv":
        highest = highest / _pool_blocks(window)
    is_known = np.isfinite(highest) & np.isfinite(reached_ns)
    reached_s = drawn.time_s + (reached_ns - window.bin_ns) / 1e9 + _PEAK_MARGIN_S
    return np.where(is_known, highest, values), np.where(is_known, reached_s, drawn.time_s)


def _curves(key: str, window: HistoryWindow) -> dict[str, FloatArray]:
    """Return the curves of panel `key`. A gauge is shown as it is, a rate or ratio as its value over the second before
    each point.
    """
    width = max(SECOND_NS // window.bin_ns, 1)
    if key in _RATES:
        rates = [trailing_mean(window.rate(name), width) for name in _RATES[key]]
        return {_BY_KEY[key].curves[0].name: np.add.reduce(rates)}
    if key in _SHARES:
        name, share = _SHARES[key]
        return {name: share.over({each: trailing_mean(window.columns[each], width) for each in share.names()})}
    if key == "kv":
        return _block_shares(window)
    if key == "step":
        return _mean_phases({name: trailing_mean(window.columns[name], width) for name in ("num_steps", *_PHASES)})
    return {curve.name: window.columns[curve.name] for curve in _BY_KEY[key].curves}


def _mean_phases(sums: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    steps = np.where(sums["num_steps"] > 0, sums["num_steps"], np.nan) * 1e9
    mean = {name: sums[name] / steps for name in _PHASES}
    return {
        "schedule_s": mean["schedule_ns"],
        "forward_s": mean["forward_ns"],
        "rest_s": np.maximum(mean["run_ns"] - mean["forward_ns"], 0),
        "commit_s": mean["commit_ns"] + mean["record_ns"],
    }


def _pool_shares(mirror: Mirror) -> dict[str, float]:
    if mirror.capabilities.free_rows:
        counts = {"cached": mirror.num_cached, "active": mirror.num_active}
        pool = mirror.num_active + mirror.num_cached + mirror.num_available_blocks
        return {name: _nan_if_none(USAGE.of({"active": part, "pool": pool})) for name, part in counts.items()}
    return {"cached": np.nan, "active": mirror.used_share if mirror.used_share >= 0 else np.nan}


def _nan_if_none(value: float | None) -> float:
    return np.nan if value is None else value


def _block_shares(window: HistoryWindow) -> dict[str, FloatArray]:
    parts = {"cached": window.columns["blocks_cached"], "active": window.columns["blocks_active"]}
    return {name: USAGE.over({"active": part, "pool": _pool_blocks(window)}) for name, part in parts.items()}


def _pool_blocks(window: HistoryWindow) -> FloatArray:
    columns = window.columns
    pool: FloatArray = columns["blocks_active"] + np.nan_to_num(columns["blocks_cached"]) + columns["blocks_free"]
    return pool


def _stacked(key: str, name: str, values: dict[str, FloatArray]) -> FloatArray:
    """Return the values to draw. Cached blocks are drawn on top of active ones, so their curve is the sum of both."""
    return values["cached"] + values["active"] if (key, name) == ("kv", "cached") else values[name]


def _range_text(bounds: PercentileBounds) -> str:
    """Format the lower and upper bound of a percentile, for example as `8.2 ms – 16 ms`."""
    low, high = bounds
    if np.isnan(low):
        return NOTHING
    return f"over {seconds(low)}" if np.isinf(high) else f"{seconds(low)} – {seconds(high)}"


def _headline_latencies(key: str, session: Session) -> dict[str, str]:
    if session.capabilities.latencies:
        p50, p95 = recent_latency(session, key)
        return {f"{key}_p50_s": seconds(p50), f"{key}_p95_s": seconds(p95)}
    until_ns = session.timeline.shown_monotonic_ns
    since_ns = until_ns - RECENT_S * SECOND_NS
    history = session.history
    return {f"{key}_p{p}_s": _range_text(history.percentile_bounds(key, p / 100, since_ns, until_ns)) for p in (50, 95)}
