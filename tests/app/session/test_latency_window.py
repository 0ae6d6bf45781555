"""Percentiles of latencies are numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope_app.session.latency_window import percentiles


@given(st.lists(st.integers(0, 1 << 50), min_size=1, max_size=60))
def test_they_are_those_of_numpy(values_ns: list[int]) -> None:
    wanted = np.percentile(values_ns, (50, 95)) / 1e9
    assert percentiles(np.array(values_ns, np.int64)) == pytest.approx(wanted.tolist(), rel=1e-9)


def test_of_nothing_there_are_none() -> None:
    assert np.isnan(percentiles(np.empty(0, np.int64))).all()
