"""Tests that latency percentiles equal those of numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope_app.session.latency_window import percentiles


@given(st.lists(st.integers(0, 1 << 50), min_size=1, max_size=60))
def test_percentiles_equal_those_of_numpy(values_ns: list[int]) -> None:
    wanted = np.percentile(values_ns, (50, 95)) / 1e9
    assert percentiles(np.array(values_ns, np.int64)) == pytest.approx(wanted.tolist(), rel=1e-9)


def test_percentiles_of_no_values_are_nan() -> None:
    assert np.isnan(percentiles(np.empty(0, np.int64))).all()
