"""Test of the times on a timeline's axis."""

from __future__ import annotations

import pytest

from kvscope_app.session.time_span import TimeSpan
from kvscope_app.views.timeline.time_axis import axis_times

SECOND = 1_000_000_000


@pytest.mark.parametrize("length_s", [0.001, 1, 3600, 86_400, 30 * 86_400, 40 * 365 * 86_400, 2_000_000_000])
def test_axis_times_fit_spans_of_any_length(length_s: float) -> None:
    span = TimeSpan(1_700_000_000 * SECOND, 1_700_000_000 * SECOND + round(length_s * SECOND))
    times = axis_times(span, 900, 90)
    assert 1 <= len(times) <= 11
    assert len({text for _, text in times}) == len(times)
