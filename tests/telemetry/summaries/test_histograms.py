"""Percentiles of latencies from histograms, as lower and upper bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvscope_telemetry.messages.telemetry import Histogram, Reading
from kvscope_telemetry.mirror.coalesce import coalesce, merge
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.summaries.histograms import UNKNOWN_RANGE, Buckets, sum_histograms

MS = 1_000_000


def histogram(counts, bounds_ms=(10, 50), kind="first_token"):
    bounds = np.array([bound * MS for bound in bounds_ms], "<u8")
    return Histogram(kind=kind, bounds_ns=bounds.tobytes(), counts=np.array(counts, "<u8").tobytes())


def reading(*latencies, used_share=-1.0):
    return Reading(epoch=1, time_ns=1, used_share=used_share, latencies=latencies)


@pytest.mark.parametrize(
    ("counts", "share", "bounds"),
    [
        ((1, 8, 1), 0.5, (0.01, 0.05)),
        ((9, 1, 0), 0.5, (0.0, 0.01)),
        ((1, 8, 1), 0.95, (0.05, math.inf)),
        ((0, 0, 4), 0.5, (0.05, math.inf)),
        ((4, 0, 0), 1.0, (0.0, 0.01)),
    ],
)
def test_percentile_lies_between_two_bucket_bounds(counts, share, bounds):
    assert Buckets.of(histogram(counts)).percentile(share) == bounds


def test_percentile_of_no_observations_is_unknown():
    assert Buckets.of(histogram((0, 0, 0))).percentile(0.5) is UNKNOWN_RANGE
    assert sum_histograms((), "first_token") is None
    assert sum_histograms((reading(histogram((1, 0, 0), kind="queued")),), "first_token") is None


def test_latency_histograms_add_up_until_their_bucket_bounds_change():
    buckets = sum_histograms([reading(histogram((1, 0, 0))), reading(histogram((0, 2, 0)))], "first_token")
    assert buckets.counts.tolist() == [1, 2, 0]
    anew = sum_histograms([reading(histogram((1, 0, 0))), reading(histogram((0, 2), bounds_ms=(20,)))], "first_token")
    assert anew.counts.tolist() == [0, 2]


def test_merged_updates_keep_all_metrics_readings_and_show_the_newest_usage():
    one, two = (coalesce((), readings=(reading(used_share=share),)) for share in (0.25, 0.5))
    update = merge((one, two))
    assert [each.used_share for each in update.readings] == [0.25, 0.5]
    mirror = Mirror()
    assert mirror.used_share == -1.0
    mirror.apply(update)
    assert mirror.used_share == 0.5
