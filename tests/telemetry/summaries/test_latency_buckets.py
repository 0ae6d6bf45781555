"""Percentiles of a range are right to half a percent, however its latencies lie in its seconds."""

from __future__ import annotations

import numpy as np
import pytest

from kvscope_telemetry.summaries import latency_buckets
from kvscope_telemetry.summaries.run_figures import quantile_of
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, Latency, Summary


@pytest.mark.parametrize("num_seconds", [1, 7, 60])
def test_where_seconds_begin_makes_no_difference(num_seconds: int) -> None:
    dice = np.random.default_rng()
    values = dice.lognormal(-3, 1.5, 5_000)
    overview = SessionOverview()
    for at, part in enumerate(np.array_split(values, num_seconds)):
        latency = Latency(part.size, *np.percentile(part, (50, 95, 99)), buckets=latency_buckets.pack(part))
        overview.extend([Summary(time_ns=at * SECOND_NS, epoch=1, first_token=latency)])
    for share in (0.5, 0.95, 0.99):
        wanted = float(np.percentile(values, 100 * share, method="inverted_cdf"))
        assert quantile_of(overview, "first_token", share, slice(None)) == pytest.approx(wanted, rel=0.006)


def test_nothing_and_everything_has_a_bucket() -> None:
    assert latency_buckets.pack(np.zeros(0)) == b""
    middles, counts = latency_buckets.unpack(latency_buckets.pack(np.array([0.0, 1e-9, 3.0, 3.0, 1e12])))
    assert counts.tolist() == [2, 2, 1]
    assert middles[1] == pytest.approx(3.0, rel=0.006)
    assert latency_buckets.unpack(b"cut")[0].size == 0
