"""The benchmark of the Requests view: every action is measured on as many requests as were asked for."""

from __future__ import annotations

from benchmarks.requests_table import measure_requests


def test_each_action_on_the_table_is_measured(qapp):
    found = measure_requests(1_500, (900, 400))
    assert found.pop("requests") == 1_500
    assert set(found) == {
        *("collect_ms", "show_ms", "refresh_ms", "sort_ms_max", "filter_ms_max", "find_ms", "paint_ms_max"),
    }
    assert all(isinstance(value, float) and value >= 0 for value in found.values())
