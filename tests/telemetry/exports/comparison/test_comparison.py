"""The comparison table: values from the run summary, differences, verdicts, and runs that differ in setup, are short
or empty.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from tests.telemetry.conftest import record
from tests.telemetry.exports.comparison.conftest import START_NS, MakeRun

from kvscope_telemetry.exports.comparison.alignment import PEAK, AlignedMoment, Alignment, named_moments, shared_moments
from kvscope_telemetry.exports.comparison.comparison import FIGURES, Comparison, ComparisonRow, Run, compare, windows
from kvscope_telemetry.exports.comparison.comparison_table import comparison_table, write_comparison_csv
from kvscope_telemetry.exports.comparison.spread import NUM_WINDOWS, Method, Verdict
from kvscope_telemetry.exports.run_summary import summarize_run
from kvscope_telemetry.exports.span import Span, span_of
from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.recordings.overview import read_overview
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.run_figures import rows_in
from kvscope_telemetry.summaries.summary import SECOND_NS, TimedEvent

__all__ = ["record"]


def rows_of(comparison: Comparison) -> dict[str, ComparisonRow]:
    return {row.key: row for row in comparison.rows}


def run_of(recording: Recording) -> Run:
    return Run(recording, read_overview(recording), span_of(recording))


def test_comparison_uses_the_values_of_the_run_summary(record: Callable) -> None:  # type: ignore[type-arg]
    recording = Recording.open(record(1500).path)
    run = run_of(recording)
    rows, found = rows_of(compare(run, run)), summarize_run(recording, run.overview, run.span)
    assert rows["length_s"].a == found.length_s
    assert rows["finished"].a == found.totals["finished"] > 0
    assert rows["preemptions"].b == found.totals["preemptions"]
    assert rows["usage_mean"].a == found.mean_usage
    assert rows["usage_peak"].a == found.peak_usage
    assert rows["first_token_p95_s"].a == found.first_token_p95_s
    assert rows["inter_token_p50_s"].a == found.inter_token_p50_s
    assert rows["decode_tokens_per_s"].a == pytest.approx(found.totals["decode_tokens"] / found.length_s, rel=0.01)
    assert rows["preemptions_per_min"].a == pytest.approx(60 * found.totals["preemptions"] / found.length_s, rel=0.01)


def test_run_compared_with_itself_is_equal(make_run: MakeRun) -> None:
    run = make_run(np.random.default_rng(1).normal(50, 5, 60))
    for row in compare(run, run).rows:
        assert row.verdict in (Verdict.EQUAL, Verdict.NONE)
        assert row.difference in (0.0, None)
    assert rows_of(compare(run, run))["hit_rate"].a == 0.75


def test_comparison_of_two_runs_reports_a_difference_only_for_changed_figures(make_run: MakeRun) -> None:
    rng = np.random.default_rng(2)
    slow, fast = make_run(rng.normal(40, 4, 120)), make_run(rng.normal(60, 4, 90))
    rows = rows_of(compare(slow, fast))
    for key in ("decode_tokens_per_s", "usage_mean", "first_token_p50_s"):
        assert rows[key].verdict is Verdict.DIFFERENT
        assert (rows[key].a_windows, rows[key].b_windows) == (NUM_WINDOWS, NUM_WINDOWS)
    assert rows["decode_tokens_per_s"].test is Method.RATIO
    assert rows["decode_tokens_per_s"].low == pytest.approx(1.45, abs=0.1)
    assert rows["decode_tokens_per_s"].high == pytest.approx(1.55, abs=0.1)
    assert rows["usage_mean"].test is Method.DIFFERENCE
    parts = rows["decode_tokens_per_s"].a_parts
    assert parts is not None
    assert 30 < parts.p5 < parts.p50 < parts.p95 < 50
    assert rows["decode_tokens_per_s"].difference == pytest.approx(20, abs=2)
    assert rows["finished_per_min"].verdict is Verdict.EQUAL
    assert rows["length_s"].verdict is Verdict.NONE
    assert rows["finished"].verdict is Verdict.NONE


def test_halves_of_one_run_are_rarely_called_different(make_run: MakeRun) -> None:
    """Checks the whole comparison, including quantiles and means that are not sums of independent seconds."""
    rng = np.random.default_rng(3)
    verdicts = []
    for _ in range(60):
        values = 50 + np.convolve(rng.normal(0, 5, 250), np.ones(10) / 3, "same")[5:245]
        whole = make_run(values)
        middle = START_NS + 120 * SECOND_NS
        halves = [
            Run(whole.recording, whole.overview, Span(START_NS, first, last))
            for first, last in ((START_NS, middle), (middle, whole.span.until_ns))
        ]
        rows = rows_of(compare(*halves))
        verdicts += [rows[key].verdict for key in ("decode_tokens_per_s", "usage_mean", "first_token_p50_s")]
    assert 0.87 <= np.mean([verdict is Verdict.OPEN for verdict in verdicts]) <= 0.995


def test_different_configuration_is_listed(make_run: MakeRun) -> None:
    comparison = compare(make_run(np.full(30, 5.0)), make_run(np.full(30, 5.0), blocks=2000))
    assert [(each.name, each.a, each.b) for each in comparison.settings] == [("blocks", "100", "2,000")]


def test_short_and_empty_runs_get_no_verdict(make_run: MakeRun) -> None:
    long, short, empty = (make_run(np.full(size, 5.0) + np.arange(size) % 3) for size in (60, 8, 0))
    assert rows_of(compare(long, short))["decode_tokens_per_s"].verdict is Verdict.UNKNOWN
    rows = rows_of(compare(long, empty))
    assert rows["usage_mean"].b is None
    assert all(row.verdict is Verdict.NONE for row in rows.values())


def test_comparison_windows_cover_each_second_of_a_run_once(make_run: MakeRun) -> None:
    run = make_run(np.arange(47.0))
    parts = windows(run.overview, run.span, NUM_WINDOWS)
    assert [rows.start for rows, _ in parts[1:]] == [rows.stop for rows, _ in parts[:-1]]
    whole = rows_in(run.overview, run.span)
    assert (parts[0][0].start, parts[-1][0].stop) == (whole.start, whole.stop)
    assert sum(span.length_s for _, span in parts) == pytest.approx(47)


def test_unrecorded_seconds_do_not_lower_a_rate(make_run: MakeRun) -> None:
    """Seconds without a recording count neither as work nor as time."""
    steady, broken = make_run(np.full(60, 50.0)), make_run(np.full(30, 50.0))
    late = Run(broken.recording, broken.overview, Span(START_NS, START_NS, START_NS + 60 * SECOND_NS))
    assert rows_of(compare(steady, late))["decode_tokens_per_s"].verdict is Verdict.EQUAL


def test_comparison_is_exported_as_csv_and_json(make_run: MakeRun) -> None:
    comparison = compare(make_run(np.full(30, 5.0)), make_run(np.full(30, 9.0)))
    table = comparison_table(comparison)
    assert table.num_rows == len(FIGURES) == len({figure.key for figure in FIGURES})
    file = io.BytesIO()
    write_comparison_csv(comparison, file)
    header, *lines = file.getvalue().decode("utf-8-sig").splitlines()
    assert header == (
        "key,label,unit,a,b,difference,a_windows,b_windows,low,high,verdict,test,a_p5,a_p50,a_p95,b_p5,b_p50,b_p95"
    )
    assert len(lines) == table.num_rows
    assert any(line.startswith("decode_tokens_per_s,") and ",5.0,9.0,4.0," in line for line in lines)
    assert msgspec.json.decode(msgspec.json.encode(comparison))["rows"][0]["key"] == "length_s"


def test_runs_can_be_aligned_by_an_event_or_peak_that_both_have(make_run: MakeRun) -> None:
    a, b = make_run(np.array([1.0, 9.0, 2.0])), make_run(np.array([1.0, 2.0, 3.0, 8.0]))
    for run, kinds in ((a, ("admitted", "preempted", "preempted")), (b, ("preempted",))):
        run.overview.extend(
            [],
            [
                TimedEvent(START_NS + place * SECOND_NS, 9, Event(kind=kind, time_ns=1, number=1))  # type: ignore[arg-type]
                for place, kind in enumerate(kinds)
            ],
        )
    assert [moment.name for moment in named_moments(a.overview)] == ["first request", "first preemption", PEAK]
    found = shared_moments(
        named_moments(a.overview, [AlignedMoment("load begins", START_NS + 5)]),
        named_moments(b.overview, [AlignedMoment("load begins", 3)]),
    )
    assert [moment.name for moment, _ in found] == ["first preemption", PEAK, "load begins"]
    offsets = [alignment.offset_ns for _, alignment in found]
    assert offsets == [-SECOND_NS, 2 * SECOND_NS, 3 - START_NS - 5]
    alignment = Alignment(7)
    assert alignment.to_a(alignment.to_b(100)) == 100
