"""Compares two runs: their key figures, the differences, and whether these exceed the variation within the runs.

Computed from the overviews alone, without replaying the recordings. Must not depend on files.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from kvscope_telemetry.exports.comparison.spread import (
    MIN_WINDOW_S,
    NUM_WINDOWS,
    FloatArray,
    Method,
    Verdict,
    judge,
)
from kvscope_telemetry.exports.run_summary import RunSummary, summarize_run
from kvscope_telemetry.exports.span import Span
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries import run_figures
from kvscope_telemetry.summaries.run_figures import Figure, rows_in
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

FIGURES: Final = tuple(figure for figure in run_figures.FIGURES if figure.is_compared)
_EXACT, _UPPER_BOUNDS = "exact", "upper bounds, from histograms"
_POOL: Final = {
    "num_blocks": "blocks",
    "block_size_tokens": "block size",
    "dtype": "KV type",
    "allocator": "allocator",
    "prefix_caching": "prefix caching",
    "num_host_blocks": "host blocks",
    "num_disk_blocks": "disk blocks",
    "num_states": "recurrent states",
    "num_host_states": "recurrent states in host memory",
}


NUM_PARTS: Final = 60
"""Maximum number of parts of a run in which a figure is measured to show how much it varies. More parts would
add no information, and would slow down the desktop's comparison window.
"""
_RATIO_UNITS: Final = ("s", "tokens/s", "1/min")


@dataclass(frozen=True, slots=True)
class Run:
    """One of the two runs: a range of a recording, with the recording's overview."""

    recording: Recording
    overview: SessionOverview
    span: Span


class RunParts(msgspec.Struct, frozen=True):
    """5 %, 50 % and 95 % quantiles of a figure in up to `NUM_PARTS` equally long parts of one run, in the figure's
    unit.
    """

    p5: float
    p50: float
    p95: float


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of run A and of run B. A value is None if it is unknown."""

    key: str
    label: str
    unit: str
    a: float | None
    b: float | None
    difference: float | None
    verdict: Verdict
    test: Method
    a_windows: int
    """Number of windows of A, out of `NUM_WINDOWS`, in which the figure is known: the test's sample size."""
    b_windows: int
    low: float | None
    """Lower end of the 95 % interval of b / a if `test` compares ratios, otherwise of b - a; `high` is the upper end.
    None without a test.
    """
    high: float | None
    a_parts: RunParts | None
    b_parts: RunParts | None


class SettingDifference(msgspec.Struct, frozen=True):
    name: str
    a: str
    b: str


class Comparison(msgspec.Struct, frozen=True):
    a: RunSummary
    b: RunSummary
    settings: tuple[SettingDifference, ...]
    rows: tuple[ComparisonRow, ...]


def compare(a: Run, b: Run) -> Comparison:
    summary_a, summary_b = (summarize_run(run.recording, run.overview, run.span) for run in (a, b))
    return Comparison(
        summary_a,
        summary_b,
        _setting_differences(summary_a, summary_b),
        tuple(_row(figure, a, b) for figure in FIGURES),
    )


def _row(figure: Figure, a: Run, b: Run) -> ComparisonRow:
    value_a, value_b = (figure.of(run.overview, run.span) for run in (a, b))
    windows_a, windows_b = (_values(figure, run, NUM_WINDOWS, MIN_WINDOW_S) for run in (a, b))
    result = judge(value_a, value_b, windows_a, windows_b, is_ratio=figure.unit in _RATIO_UNITS)
    verdict = result.verdict
    if not figure.has_spread and verdict is not Verdict.EQUAL:
        verdict = Verdict.NONE
    return ComparisonRow(
        key=figure.key,
        label=figure.name,
        unit=figure.unit,
        a=value_a,
        b=value_b,
        difference=None if value_a is None or value_b is None else value_b - value_a,
        verdict=verdict,
        test=result.test,
        a_windows=result.num_a,
        b_windows=result.num_b,
        low=result.low,
        high=result.high,
        a_parts=_parts(figure, a),
        b_parts=_parts(figure, b),
    )


def _values(figure: Figure, run: Run, number: int, min_part_s: float) -> FloatArray:
    """Return the figure in each of `number` equally long parts of the run, NaN where it is unknown.

    The result is empty if the parts would be shorter than `min_part_s` seconds, or if the figure has only one value per
    run (`has_spread`).
    """
    if not figure.has_spread or run.span.length_s < number * min_part_s:
        return np.empty(0)
    parts = windows(run.overview, run.span, number)
    values = [figure.measure(run.overview, rows, span) for rows, span in parts if rows.stop > rows.start]
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _parts(figure: Figure, run: Run) -> RunParts | None:
    values = (
        _values(figure, run, min(NUM_PARTS, int(run.span.length_s)), 1.0) if run.span.length_s >= 1 else np.empty(0)
    )
    known = values[np.isfinite(values)]
    return RunParts(*np.quantile(known, (0.05, 0.5, 0.95)).tolist()) if known.size else None


def _setting_differences(a: RunSummary, b: RunSummary) -> tuple[SettingDifference, ...]:
    pairs = [
        ("model", a.model, b.model),
        ("device", a.device, b.device),
        ("engine", a.engine_version, b.engine_version),
    ]
    latencies_a, latencies_b = (_UPPER_BOUNDS if summary.latencies_are_bounds else _EXACT for summary in (a, b))
    pairs += [("latencies", latencies_a, latencies_b)]
    pairs += [
        (name, _value_text(getattr(a.pool, field)), _value_text(getattr(b.pool, field)))
        for field, name in _POOL.items()
    ]
    return tuple(SettingDifference(name, value_a, value_b) for name, value_a, value_b in pairs if value_a != value_b)


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)


def windows(overview: SessionOverview, span: Span, number: int) -> list[tuple[slice, Span]]:
    """Split `span` into `number` parts of equal length. Returns for each the slice of the overview's seconds that
    start in it, and the time range of these seconds.
    """
    rows = rows_in(overview, span)
    edges = span.from_ns + (span.until_ns - span.from_ns) * np.arange(number + 1) // number
    cuts = np.searchsorted(overview.time_ns[rows], edges[1:-1], "left") + rows.start
    bounds = [rows.start, *cuts.tolist(), rows.stop]
    parts = []
    for first, last in pairwise(bounds):
        begin = max(int(overview.time_ns[first]), span.from_ns) if first < last else span.from_ns
        end = min(int(overview.time_ns[last - 1]) + SECOND_NS, span.until_ns) if first < last else span.from_ns
        parts.append((slice(first, last), Span(span.start_ns, begin, end)))
    return parts
