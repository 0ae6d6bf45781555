"""What the throughput panels are, and how a stretch of history becomes their curves and values.

Owns the list of panels; widgets come from `chart.panel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

import numpy as np

from kvscope_app.look.number_text import NOTHING, percent, plural, seconds, short
from kvscope_app.session.event_log import LoggedEvent
from kvscope_app.session.history import HISTOGRAMS, History, HistoryWindow
from kvscope_app.session.session import Session
from kvscope_app.views.chart.curves import FloatArray, trailing_mean
from kvscope_app.views.chart.panel import ChartPanel, CurveSpec, Mark
from kvscope_telemetry.latencies import FIRST_TOKEN, INTER_TOKEN, QUEUED
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.event_kinds import cause_text
from kvscope_telemetry.summaries.figures import ACCEPTED, BY_KEY, HIT_RATE, USAGE
from kvscope_telemetry.summaries.histograms import Range

MAX_MARKED_EVENTS: Final = 2000
_MARKS_ACROSS: Final = 80
"""Preemptions closer than this part of the time shown share a mark: more would lie on top of each other."""
_NAMED_ON_A_MARK: Final = 4
_LATENCY_WINDOW_S: Final = 10.0
_JOIN_LATENCIES_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """One panel: its curves, how its axis and its values are written."""

    key: str
    title: str
    curves: tuple[CurveSpec, ...]
    axis_text: Callable[[float], str]
    value_text: Callable[[float], str]
    top: float | None = None
    join_gap_s: float = 0.0
    needs: str = ""
    """A column that not every source has: without it the panel is not shown."""
    tip: str = ""

    def make_panel(self) -> ChartPanel:
        """The widget."""
        made = ChartPanel(self.title, self.curves, self.axis_text, top=self.top, join_gap_s=self.join_gap_s)
        made.legend.explain(self.tip)
        return made


@dataclass(slots=True)
class Drawn:
    """What a panel shows: times in seconds of the monotonic clock, values by curve, shape (n,) each."""

    time_s: FloatArray
    values: dict[str, FloatArray] = field(default_factory=dict)
    latest: dict[str, str] = field(default_factory=dict)
    prefix: str = ""
    """Before each value: "≤ " where they are upper bounds."""


def _tokens(value: float) -> str:
    return NOTHING if not np.isfinite(value) else f"{short(value)} tok/s"


def _blocks(value: float) -> str:
    return NOTHING if not np.isfinite(value) else f"{short(value)}/s"


def _axis_seconds(value: float) -> str:
    """An axis has no room for `2:30 min`."""
    return seconds(value) if value < 60 else f"{value:.0f} s" if value < 1000 else f"{value / 60:.0f} min"


def _whole(value: float) -> str:
    return NOTHING if not np.isfinite(value) else short(round(value))


def _share(value: float) -> str:
    return NOTHING if not np.isfinite(value) else percent(value)


def _watts(value: float) -> str:
    return NOTHING if not np.isfinite(value) else f"{value:.0f} W"


def _celsius(value: float) -> str:
    return NOTHING if not np.isfinite(value) else f"{value:.0f} °C"


PANELS: Final = (
    PanelSpec("decode", "Decode", (CurveSpec("decode_tokens", "", 2),), short, _tokens),
    PanelSpec("prefill", "Prefill", (CurveSpec("prefill_tokens", "", 0),), short, _tokens),
    PanelSpec(
        "requests",
        "Requests",
        (CurveSpec("num_running", "running", 2), CurveSpec("num_waiting", "waiting", 5)),
        short,
        _whole,
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
    ),
    PanelSpec(
        "ttft",
        FIRST_TOKEN.name,
        (CurveSpec("ttft_p50_s", "p50", 6), CurveSpec("ttft_p95_s", "p95", 3)),
        _axis_seconds,
        seconds,
        join_gap_s=_JOIN_LATENCIES_S,
        tip=f"{FIRST_TOKEN.counts}.",
    ),
    PanelSpec(
        "queue",
        QUEUED.name,
        (CurveSpec("queue_p50_s", "p50", 6), CurveSpec("queue_p95_s", "p95", 3)),
        _axis_seconds,
        seconds,
        join_gap_s=_JOIN_LATENCIES_S,
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
        "inputs, sampling and other device work; all of it where the model's part is not told. Commit: storing and "
        "reporting results.",
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
    "decode": "decode_tokens",
    "prefill": "prefill_tokens",
    "evicted": "evicted_blocks",
    "copied": "copied_blocks",
}
_SHARES: Final = {"hits": ("hit_share", HIT_RATE), "drafts": ("draft_share", ACCEPTED)}
"""Curves that are a part of a whole."""
_PHASES: Final = ("schedule_ns", "run_ns", "forward_ns", "commit_ns", "record_ns")
_BY_KEY: Final = {spec.key: spec for spec in PANELS}


def columns_of(keys: Iterable[str]) -> set[str]:
    """The columns of the history that panels need; `num_running` tells where nothing was heard."""
    blocks = {"blocks_active", "blocks_cached", "blocks_free"}
    made = {"kv": blocks, "step": set(_PHASES)}
    made |= {key: set(share.names()) for key, (_, share) in _SHARES.items()}
    curves = (made.get(key) or {curve.name for curve in _BY_KEY[key].curves} for key in keys)
    return {"num_steps", "num_running"}.union(*curves)


def draw(panel: ChartPanel, key: str, window: HistoryWindow, session: Session, span_s: float) -> Drawn:
    """Draw the curves of panel `key` over `span_s` seconds, and say what was drawn."""
    until_ns = session.timeline.shown_until_ns
    curves = _curves(key, window, span_s)
    last = -1 if not window.is_over and window.end_ns >= until_ns - window.bin_ns else None
    time_s = (window.time_s + window.end_ns / 1e9)[:last]
    is_bound = key in HISTOGRAMS and not session.capabilities.latencies
    prefix = "≤ " if is_bound else ""
    drawn = Drawn(time_s, prefix=prefix, values={name: values[:last] for name, values in curves.items()})
    phase = int(window.end_ns // window.bin_ns) - len(window.time_s) + 1
    highest = [panel.show_curve(name, time_s, _stacked(key, name, drawn.values), phase) for name in drawn.values]
    panel.fit(max(highest))
    if window.is_over and not session.timeline.is_live:
        drawn.latest = values_at(key, drawn, until_ns / 1e9)
    else:
        drawn.latest = _latest(key, drawn, session.history, max(window.end_ns, until_ns), session.capabilities)
    return drawn


def is_level(window: HistoryWindow) -> bool:
    """Whether nothing in it changes. Its newest second may not be known yet."""
    settled = [column[: -1_000_000_000 // window.bin_ns] for column in window.columns.values()]
    return all(column.size > 0 and bool((column == column[0]).all() or np.isnan(column).all()) for column in settled)


def values_at(key: str, drawn: Drawn, x: float) -> dict[str, str]:
    """The values of each curve nearest to second `x`."""
    if not drawn.time_s.size:
        return {}
    index = int(np.clip(np.searchsorted(drawn.time_s, x), 0, drawn.time_s.size - 1))
    texts = {name: _BY_KEY[key].value_text(float(values[index])) for name, values in drawn.values.items()}
    return {name: text if text == NOTHING else f"{drawn.prefix}{text}" for name, text in texts.items()}


def marks_of_overview(window: HistoryWindow, first_s: float, last_s: float) -> list[Mark]:
    """The same where there are only seconds: how many there were."""
    counts = np.nan_to_num(window.columns["preemptions"])
    places = np.flatnonzero(counts)
    times_s = (window.time_s + window.end_ns / 1e9)[places]
    groups = (times_s // max((last_s - first_s) / _MARKS_ACROSS, 1e-9)).astype(np.int64)
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    sums = np.add.reduceat(counts[places], starts) if starts.size else np.empty(0)
    return [
        Mark(float(x), plural(round(number), "preemption")) for x, number in zip(times_s[starts], sums, strict=True)
    ]


def preemption_marks(history: History, first_s: float, last_s: float) -> list[Mark]:
    """The newest preemptions between two seconds; each mark tells who, for whom and why."""
    entries = history.events.between(int(first_s * 1e9), int(last_s * 1e9), "preempted", MAX_MARKED_EVENTS)
    # Absolute stretches of time, so that marks stay what they are as the window moves on.
    width_ns = max(int((last_s - first_s) * 1e9) // _MARKS_ACROSS, 1)
    groups = groupby(entries, key=lambda entry: entry.time_ns // width_ns)
    return [_mark(list(group), history) for _, group in groups]


def _mark(entries: list[LoggedEvent], history: History) -> Mark:
    lines = [f"Request {e.event.number} preempted: {cause_text(e.event)}" for e in entries[:_NAMED_ON_A_MARK]]
    rest = len(entries) - len(lines)
    text = "\n".join([*lines, f"and {rest} more"] if rest else lines)
    return Mark(entries[0].time_ns / 1e9, text, history.timed(entries[0]))


def _curves(key: str, window: HistoryWindow, span_s: float) -> dict[str, FloatArray]:
    width = _smoothing(span_s, window.bin_ns)
    if key in _RATES:
        return {_RATES[key]: trailing_mean(window.rate(_RATES[key]), width)}
    if key in _SHARES:
        name, share = _SHARES[key]
        return {name: share.over({each: trailing_mean(window.columns[each], width) for each in share.names()})}
    if key == "kv":
        return _block_shares(window)
    if key == "step":
        return _phases(window, width)
    return {curve.name: window.columns[curve.name] for curve in _BY_KEY[key].curves}


def _phases(window: HistoryWindow, width: int) -> dict[str, FloatArray]:
    """Seconds of a step that each part took, on average; unknown where there was no step."""
    steps = trailing_mean(window.columns["num_steps"], width)
    steps = np.where(steps > 0, steps, np.nan) * 1e9
    mean = {name: trailing_mean(window.columns[name], width) / steps for name in _PHASES}
    return {
        "schedule_s": mean["schedule_ns"],
        "forward_s": mean["forward_ns"],
        "rest_s": np.maximum(mean["run_ns"] - mean["forward_ns"], 0),
        "commit_s": mean["commit_ns"] + mean["record_ns"],
    }


def _smoothing(span_s: float, bin_ns: int) -> int:
    """Bins averaged: steps of 50 ms beat against bins of 100 ms. Half a second up to five."""
    return max(int(np.clip(span_s / 60, 0.5, 5.0) * 1e9) // bin_ns, 1)


def _block_shares(window: HistoryWindow) -> dict[str, FloatArray]:
    active, cached = window.columns["blocks_active"], window.columns["blocks_cached"]
    total = active + np.nan_to_num(cached) + window.columns["blocks_free"]
    return {
        name: USAGE.over({"active": part, "pool": total}) for name, part in (("cached", cached), ("active", active))
    }


def _stacked(key: str, name: str, values: dict[str, FloatArray]) -> FloatArray:
    """Cached lies on top of active, and is painted first."""
    return values["cached"] + values["active"] if (key, name) == ("kv", "cached") else values[name]


def _range_text(bounds: Range) -> str:
    """Between which two a percentile lies."""
    low, high = bounds
    if np.isnan(low):
        return NOTHING
    return f"over {seconds(low)}" if np.isinf(high) else f"{seconds(low)} – {seconds(high)}"


def _latest(key: str, drawn: Drawn, history: History, end_ns: int, capabilities: Capabilities) -> dict[str, str]:
    windows = {"ttft": history.first_token, "itl": history.inter_token, "queue": history.queued}
    latencies = windows.get(key)
    since_ns = end_ns - int(_LATENCY_WINDOW_S * 1e9)
    if latencies is not None and not capabilities.latencies:
        return {f"{key}_p{p}_s": _range_text(history.range_of(key, p / 100, since_ns)) for p in (50, 95)}
    if latencies is not None:
        p50, p95 = latencies.recent(since_ns)
        return {f"{key}_p50_s": seconds(p50), f"{key}_p95_s": seconds(p95)}
    text = _BY_KEY[key].value_text
    return {name: text(_last_known(values)) for name, values in drawn.values.items()}


def _last_known(values: FloatArray) -> float:
    """The newest value, unless nothing was heard for the last five bins."""
    known = np.flatnonzero(np.isfinite(values[-20:]))
    return float(values[-20:][known[-1]]) if known.size else np.nan
