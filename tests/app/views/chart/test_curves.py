"""Tests of curve data: areas, means, decimation and gaps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope_app.views.chart.curves import close_areas, decimate, gaps, join_near, nearest, nice_ceiling, trailing_mean

NAN = np.nan


def test_filled_chart_area_drops_to_zero_at_a_gap_in_the_data():
    x, y, joined = close_areas(np.array([0.0, 1, 5, 6]), np.array([3.0, 4, 7, 8]), np.array([True, False, True, False]))
    assert x.tolist() == [0, 1, 1, 5, 5, 6]
    assert y.tolist() == [3, 4, 0, 0, 7, 8]
    assert joined.tolist() == [True] * 5 + [False]


def test_filled_chart_area_without_a_gap_has_no_added_points():
    x, y, joined = close_areas(np.array([0.0, 1]), np.array([3.0, 4]), np.array([True, False]))
    assert (x.tolist(), y.tolist(), joined.tolist()) == ([0, 1], [3, 4], [True, False])
    assert close_areas(np.empty(0), np.empty(0), np.empty(0, bool))[0].size == 0


def test_trailing_mean_ignores_unknown_values():
    mean = trailing_mean(np.array([2.0, 4.0, NAN, 8.0]), 3)
    assert mean[:2].tolist() == [2.0, 3.0]
    assert np.isnan(mean[2])
    assert mean[3] == 6.0


@given(st.integers(1, 3000), st.integers(20, 300), st.integers(0, 50), st.integers(0, 2**31))
def test_decimation_keeps_extremes_and_limits_the_number_of_points(size, max_columns, phase, seed):
    y = np.random.default_rng(seed).normal(size=size)
    x = np.arange(size, dtype=float)
    thin_x, thin_y = decimate(x, y, max_columns, phase)
    assert thin_y.size <= 2 * (max_columns + 1) or thin_y.size == size
    assert np.nanmin(thin_y) == y.min()
    assert np.nanmax(thin_y) == y.max()
    assert (np.diff(thin_x) >= 0).all()


def test_decimated_points_stay_the_same_as_the_window_moves():
    y = np.random.default_rng(1).normal(size=1001)
    x = np.arange(1001, dtype=float)
    _, before = decimate(x[:1000], y[:1000], 100, phase=0)
    _, after = decimate(x[1:], y[1:], 100, phase=1)
    assert np.array_equal(before[2:-2], after[2 : before.size - 2])


def test_unknown_and_distant_points_are_not_joined():
    x, y, joined = join_near(np.array([0.0, 1, 2, 3, 9]), np.array([1.0, NAN, 2, 3, 4]), 1.5)
    assert x.tolist() == [0, 2, 3, 9]
    assert y.tolist() == [1, 2, 3, 4]
    assert joined.tolist() == [False, True, False, False]


def test_chart_gap_is_found_only_after_the_first_known_point():
    x = np.arange(6, dtype=float)
    known = np.array([False, True, False, False, True, True])
    assert gaps(x, known, 1.5) == [(1.0, 4.0)]
    assert gaps(x, np.zeros(6, bool), 1.5) == []
    ended = np.array([True, True, True, True, False, False])
    assert gaps(x, ended, 1.5) == [(3.0, 5.0)]
    assert gaps(x, ended, 2.5) == []


@pytest.mark.parametrize(("value", "top"), [(0, 1), (0.7, 0.8), (1, 1), (1.01, 2), (13, 20), (95, 100), (2.5e-4, 3e-4)])
def test_axis_ends_on_a_round_number(value, top):
    assert nice_ceiling(value) == pytest.approx(top)


@pytest.mark.parametrize(
    ("at", "point"), [(10.0, 10.0), (11.4, 11.0), (11.6, 12.0), (9.2, 10.0), (13.9, 13.0), (8.0, 8.0), (15.0, 15.0)]
)
def test_nearest_chart_point_is_returned_unless_the_time_is_far_beyond_the_ends(at, point):
    assert nearest(np.array([10.0, 11.0, 12.0, 13.0]), at) == point
    assert nearest(np.empty(0), at) == at
