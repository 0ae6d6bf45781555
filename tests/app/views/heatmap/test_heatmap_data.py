"""Tests of the heatmap's data: keys per second, bins of pools of several sizes, time scales, fragmentation."""

from __future__ import annotations

import numpy as np
import pytest

from kvscope_app.session.time_span import TimeSpan
from kvscope_app.views.heatmap.address_rows import NO_ADDRESS, max_over_ranges, resample_keys
from kvscope_app.views.heatmap.key_store import KeyStore
from kvscope_app.views.heatmap.measures import NO_RUNS, num_sizes, run_keys, size_text
from kvscope_app.views.heatmap.time_frame import TimeFrame, TimeFrameMode
from kvscope_app.views.heatmap.time_scale import FIRST_COLUMN_NS, TimeScale
from kvscope_telemetry.ledger import Ledger
from kvscope_telemetry.summaries.address_bins import bin_edges
from kvscope_telemetry.summaries.run_figures import fragmentation_of
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary


def key_of_second(overview, places):
    """Return one cell per second: its number modulo 251."""
    return (overview.time_ns[places] // SECOND_NS % 251 + 1).astype(np.uint8)[:, None]


@pytest.fixture
def add_seconds(overview, begin_ns):
    """Function that appends empty seconds, for example `add_seconds(3, 4)`."""

    def add_seconds(*indexes, step=0):
        overview.extend(Summary(time_ns=begin_ns + i * SECOND_NS, epoch=1, step=step) for i in indexes)

    return add_seconds


def expected_columns(overview, scale):
    columns = np.zeros(scale.width, np.uint8)
    for time_ns in overview.time_ns.tolist():
        key = int(time_ns // SECOND_NS % 251 + 1)
        for column in range(scale.width):
            begin = (scale.first + column) * scale.column_ns
            if time_ns < begin + scale.column_ns and time_ns + SECOND_NS > begin:
                columns[column] = max(columns[column], key)
    return columns


@pytest.mark.parametrize("column_ns", [SECOND_NS // 7, SECOND_NS, SECOND_NS * 5 // 2, SECOND_NS * 9])
def test_heatmap_column_has_the_highest_value_of_the_seconds_it_covers(overview, add_seconds, begin_ns, column_ns):
    add_seconds(*range(10), *range(14, 33), 40)
    store = KeyStore(key_of_second, 1)
    assert store.update(overview) == begin_ns
    scale = TimeScale(begin_ns // column_ns - 3, 60, column_ns)
    assert np.array_equal(store.columns(scale, 0, 60)[:, 0], expected_columns(overview, scale))
    assert np.array_equal(store.columns(scale, 20, 31)[:, 0], expected_columns(overview, scale)[20:31])


def test_heatmap_columns_follow_an_overview_that_gains_and_drops_seconds(overview, add_seconds, begin_ns, rng):
    store = KeyStore(key_of_second, 1)
    scale = TimeScale(begin_ns // SECOND_NS, 400, SECOND_NS)
    last = -1
    for _ in range(60):
        last += int(rng.integers(0, 4))
        add_seconds(last)
        if rng.random() < 0.2:
            overview.forget_before(begin_ns + (last - 30) * SECOND_NS)
        store.update(overview)
        assert np.array_equal(store.columns(scale, 0, 400)[:, 0], expected_columns(overview, scale))
    assert store.update(overview) is None
    add_seconds(last - 5)  # the clock went back: later seconds are dropped
    assert store.update(overview) is not None
    assert np.array_equal(store.columns(scale, 0, 400)[:, 0], expected_columns(overview, scale))


def test_heatmap_data_of_a_long_overview_is_thinned_without_missing_a_maximum(overview, add_seconds, begin_ns):
    store = KeyStore(key_of_second, 1, max_rows=16)
    for begin in range(0, 100, 10):
        add_seconds(*range(begin, begin + 10))
        store.update(overview)
        assert len(store) <= 16
    scale = TimeScale(begin_ns // (SECOND_NS * 100), 2, SECOND_NS * 100)
    assert store.columns(scale, 0, 2).max() == expected_columns(overview, scale).max()
    fine = TimeScale(begin_ns // SECOND_NS, 100, SECOND_NS)
    assert np.all(store.columns(fine, 0, 100)[:, 0] >= expected_columns(overview, fine))


def test_heatmap_data_is_rebuilt_for_another_overview(overview, add_seconds, begin_ns):
    add_seconds(1, 2, 3)
    store = KeyStore(key_of_second, 1)
    store.update(overview)
    other = type(overview)()
    other.extend([Summary(time_ns=begin_ns + 90 * SECOND_NS, epoch=1)])
    store.update(other)
    assert len(store) == 1
    assert store.first_ns == begin_ns + 90 * SECOND_NS


@pytest.mark.parametrize(
    ("num_own", "num_addresses"), [(5, 5), (5, 9), (700, 1_500), (3_000, 5_000), (3_000, 100_001), (1, 4_000)]
)
def test_heatmap_bins_of_a_smaller_pool_are_spread_over_the_addresses_of_a_larger_one(num_own, num_addresses, rng):
    keys = rng.integers(2, 250, (2, min(num_own, 1024))).astype(np.uint8)
    result = resample_keys(keys, num_own, num_addresses)
    own_edges, edges = bin_edges(num_own), bin_edges(num_addresses)
    assert result.shape == (2, len(edges) - 1)
    for cell in range(result.shape[1]):
        covering = [
            bin_
            for bin_ in range(keys.shape[1])
            if own_edges[bin_] < edges[cell + 1] and own_edges[bin_ + 1] > edges[cell]
        ]
        for row in range(2):
            assert result[row, cell] == (keys[row, covering].max() if covering else NO_ADDRESS)


def test_maximum_over_each_range_of_heatmap_values_equals_numpy(rng):
    keys = rng.integers(1, 250, (30, 3)).astype(np.uint8)
    starts, ends = np.array([0, 3, 3, 7, 29, 30, 40]), np.array([3, 3, 9, 30, 30, 30, 50])
    result = max_over_ranges(keys, starts, ends, axis=0)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        wanted = keys[start:end].max(axis=0) if end > start and start < 30 else np.zeros(3)
        if start < 30:
            assert np.array_equal(result[row], wanted)
    assert np.array_equal(max_over_ranges(keys.T, starts, ends, axis=1), result.T)
    assert max_over_ranges(keys[:0], starts, ends, axis=0).shape == (7, 3)


def test_zooming_the_heatmap_time_scale_keeps_the_time_at_the_anchor_pixel(begin_ns):
    scale = TimeScale(begin_ns // SECOND_NS, 500, SECOND_NS)
    for factor in (1.25, 5.0, 0.2, 1e9, 1e-9):
        zoomed = scale.zoomed(factor, 123)
        assert abs(zoomed.x_of(scale.time_at(123)) - 123) <= 1
    fitted = scale.fitted(begin_ns, begin_ns + 7_200 * SECOND_NS)
    assert fitted.begin_ns <= begin_ns
    assert fitted.end_ns >= begin_ns + 7_200 * SECOND_NS
    assert fitted.end_ns - fitted.begin_ns < 8_000 * SECOND_NS
    assert scale.fitted(begin_ns, begin_ns + SECOND_NS).column_ns == FIRST_COLUMN_NS


def test_fitted_heatmap_rarely_changes_its_time_scale_while_the_range_grows(qapp, begin_ns):
    frame = TimeFrame()
    frame.set_width(500)
    scales = set()
    for seconds in range(1, 2_000):
        frame.set_range(begin_ns, begin_ns + seconds * SECOND_NS)
        assert frame.scale.begin_ns <= begin_ns
        assert frame.scale.end_ns >= begin_ns + seconds * SECOND_NS
        scales.add(frame.scale)
    assert len(scales) < 60
    assert frame.mode is TimeFrameMode.FIT
    frame.pan(10_000)
    assert frame.scale.end_ns > begin_ns, "part of the range must stay visible"


def test_fragmentation_and_free_run_lengths_are_computed_for_partly_used_full_and_empty_pool(
    overview, make_summary, begin_ns
):
    ledger = Ledger(64)
    ledger.state[::2] = 1
    ledger.filled[::2] = 4
    overview.extend([make_summary(0, ledger)])  # 32 separate free blocks; 4 of 16 slots used
    ledger.state[:] = 1
    overview.extend([make_summary(1, ledger)])  # no free block
    ledger.state[:] = 0
    overview.extend([make_summary(2, ledger)])  # all blocks free
    np.testing.assert_allclose(fragmentation_of(overview), [1 - 1 / 32, np.nan, 0])
    keys = run_keys(overview, np.arange(3), num_sizes(64))
    assert keys.shape == (3, 7)
    assert keys[0].tolist() == [NO_RUNS] * 6 + [NO_RUNS + 6]  # 32 runs of length 1
    assert keys[1].tolist() == [NO_RUNS] * 7
    assert keys[2].tolist() == [NO_RUNS + 1] + [NO_RUNS] * 6
    assert [size_text(power) for power in range(3)] == ["1", "2 to 3", "4 to 7"]


def test_time_range_shown_in_the_heatmap_fills_its_width():
    frame = TimeFrame()
    frame.set_width(600)
    begin_ns = 1_000 * SECOND_NS
    frame.set_range(begin_ns, begin_ns + 3_600 * SECOND_NS)
    for seconds in (50, 900):
        frame.show_only(TimeSpan(begin_ns + SECOND_NS, begin_ns + (1 + seconds) * SECOND_NS))
        assert frame.scale.begin_ns <= begin_ns + SECOND_NS
        assert seconds <= (frame.scale.end_ns - begin_ns) / SECOND_NS - 1 < seconds * 1.02
        assert frame.mode is TimeFrameMode.FIXED
