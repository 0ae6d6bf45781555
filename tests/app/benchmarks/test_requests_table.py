"""Tests of the benchmark of the Requests view."""

from __future__ import annotations

from benchmarks.requests_table import measure_requests


def test_benchmark_measures_each_action_on_the_requested_number_of_rows(qapp):
    found = measure_requests(1_500, (900, 400))
    assert found.pop("requests") == 1_500
    assert set(found) == {
        *("collect_ms", "show_ms", "refresh_ms", "sort_ms_max", "filter_ms_max", "find_ms", "paint_ms_max"),
    }
    assert all(isinstance(value, float) and value >= 0 for value in found.values())
