"""Tests of the conversion from times to pixel columns, compared with a plain loop."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import examples

from kvscope_app.session.time_span import SHORTEST_NS, TimeSpan, whole_span
from kvscope_app.views.timeline import lane_raster
from kvscope_app.views.timeline.time_axis import axis_times
from kvscope_telemetry.summaries.summary import SECOND_NS

spans = st.builds(
    lambda begin, length: TimeSpan(begin, begin + length), st.integers(0, 10**11), st.integers(10**6, 10**12)
)


@settings(max_examples=examples(100), deadline=None)
@given(st.sets(st.integers(0, 200), max_size=60), spans, st.integers(1, 50))
def test_column_minimum_and_maximum_equal_those_of_its_seconds(seconds, span, num_columns):
    times = np.array(sorted(seconds), np.int64) * SECOND_NS
    values = np.array([(second * 37) % 11 for second in sorted(seconds)], float)
    edges = lane_raster.column_edges(span, num_columns)
    low, high = lane_raster.min_and_max(values, *lane_raster.seconds_in(times, edges)) if seconds else (None, None)
    for column in range(num_columns if seconds else 0):
        touched = [
            value
            for at, value in zip(times.tolist(), values.tolist(), strict=True)
            if at + SECOND_NS > edges[column] and at < edges[column + 1]
        ]
        if touched:
            assert (low[column], high[column]) == (min(touched), max(touched))
        else:
            assert np.isnan(low[column])


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(0, 10**9), max_size=40), st.integers(1, 30))
def test_each_event_time_is_counted_in_exactly_one_column(times, num_columns):
    edges = lane_raster.column_edges(TimeSpan(0, 10**9 + 1), num_columns)
    counts = lane_raster.moments(np.array(sorted(times), np.int64), edges)
    assert counts.sum() == len(times)


def test_span_shorter_than_a_pixel_is_drawn_as_one_pixel():
    lines = np.zeros((2, 10), np.uint32)
    lane_raster.draw_spans(
        lines, np.array([0, 1, 0]), np.array([-3, 4, 9]), np.array([2, 4, 50]), np.array([1, 2, 3], np.uint32)
    )
    assert lines.tolist() == [[1, 1, 0, 0, 0, 0, 0, 0, 0, 3], [0, 0, 0, 0, 2, 0, 0, 0, 0, 0]]


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 10**13), st.integers(1, 10**13), st.floats(0, 1), st.lists(st.floats(0.01, 100), max_size=8))
def test_zoomed_span_stays_within_the_whole_and_keeps_the_anchor(begin, length, share, factors):
    whole = whole_span(begin, begin + length)
    span = whole
    for factor in factors:
        zoomed = span.zoomed(factor, share, whole)
        assert whole.begin_ns <= zoomed.begin_ns < zoomed.end_ns <= whole.end_ns
        assert zoomed.length_ns >= SHORTEST_NS
        if factor < 1:
            assert abs(zoomed.time_at(share) - span.time_at(share)) <= 2
        span = zoomed


def test_axis_has_distinct_times_from_hours_to_fractions_of_milliseconds():
    for length_ns in (10 * 3600 * SECOND_NS, 60 * SECOND_NS, SECOND_NS, SHORTEST_NS):
        span = TimeSpan(1_700_000_000 * SECOND_NS, 1_700_000_000 * SECOND_NS + length_ns)
        marks = axis_times(span, 1_000)
        assert 2 <= len(marks) <= 12
        assert len({text for _, text in marks}) == len(marks)
