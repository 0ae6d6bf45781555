"""Tests of the overview as chart data: one bin per second, and NaN for missing seconds."""

from __future__ import annotations

import numpy as np
import pytest

from kvscope_app.session.overview_window import (
    MAX_SECONDS,
    first_relevant_ns,
    known_columns_of,
    overview_span_ns,
    overview_window,
)
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, Latency, Summary

WALL_NS = 1_000 * SECOND_NS
"""Offset from the charts' clock to wall time."""


def overview_of(seconds, **columns):
    overview = SessionOverview()
    overview.extend(
        Summary(time_ns=WALL_NS + second * SECOND_NS, epoch=7, num_steps=second + 1, **columns) for second in seconds
    )
    return overview


def test_overview_window_has_one_bin_per_second():
    window = overview_window(overview_of(range(10)), WALL_NS, 2 * SECOND_NS, 6 * SECOND_NS, ["num_steps"])
    assert window.columns["num_steps"].tolist() == [3, 4, 5, 6]
    assert (window.time_s + window.end_ns / 1e9).tolist() == pytest.approx([3.0, 4.0, 5.0, 6.0])
    assert (window.bin_ns, window.is_complete) == (SECOND_NS, True)
    assert window.rate("num_steps").tolist() == [3, 4, 5, 6]


def test_overview_window_is_nan_in_a_second_without_a_summary():
    window = overview_window(overview_of([0, 1, 4]), WALL_NS, 0, 9 * SECOND_NS, ["num_steps", "blocks_active"])
    assert np.array_equal(window.columns["num_steps"], [1, 2, np.nan, np.nan, 5], equal_nan=True)
    assert np.isnan(window.columns["blocks_active"]).tolist() == [False, False, True, True, False]


def test_overview_columns_are_found_by_the_column_names_of_the_history():
    overview = overview_of(range(3), active_blocks=5, process_bytes=9, queued=Latency(2, 0.5, 0.7, 0.9))
    names = ["blocks_active", "process_bytes", "queue_p95_s"]
    window = overview_window(overview, WALL_NS, 0, 3 * SECOND_NS, names)
    assert [window.columns[name][-1] for name in names] == [5, 9, 0.7]


def test_overview_returns_no_chart_data_for_a_range_without_seconds():
    assert overview_window(SessionOverview(), WALL_NS, 0, SECOND_NS, ["num_steps"]) is None
    assert overview_span_ns(SessionOverview()) is None
    overview = overview_of(range(3))
    assert overview_window(overview, WALL_NS, 5 * SECOND_NS, 9 * SECOND_NS, ["num_steps"]) is None
    assert overview_span_ns(overview) == (WALL_NS, WALL_NS + 3 * SECOND_NS)


def test_long_gap_does_not_exceed_the_maximum_number_of_bins():
    overview = overview_of([0, 10_000_000])
    window = overview_window(overview, WALL_NS, 0, 10_000_001 * SECOND_NS, ["num_steps"])
    assert window.time_s.size == MAX_SECONDS
    assert window.columns["num_steps"][-1] == 10_000_001


def test_overview_columns_that_were_never_reported_are_not_known():
    assert known_columns_of(overview_of(range(3))) == set()
    overview = overview_of(range(3), copied_blocks=1, queued=Latency(1, 0.1, 0.1, 0.1), power_watts=90.0)
    assert known_columns_of(overview) == {"copied_blocks", "queue_p50_s", "power_watts"}


@pytest.mark.parametrize(
    ("start", "seconds", "now", "first"),
    [
        (0, range(600), 600, 0),  # all of the last ten minutes
        (0, [0, *range(1_600, 1_610)], 1_610, 1_600),  # the last step was long ago
        (0, [700, *range(1_600, 1_610)], 1_610, 1_600),  # the start was even longer ago
        (0, [700], 1_600, 1_600),  # nothing newer yet
        (0, [], 1_600, 1_600),
        (0, [*range(5), *range(1_600, 1_610)], 1_610, 0),  # the engine fell silent later
    ],
)
def test_live_timeline_begins_at_the_first_recent_activity(start, seconds, now, first):
    found_ns = first_relevant_ns(overview_of(seconds), WALL_NS + start * SECOND_NS, WALL_NS + now * SECOND_NS)
    assert (found_ns - WALL_NS) / SECOND_NS == first
