"""Keys of seconds, kept and thinned; addresses of pools of several sizes; scales of time; measures."""

from __future__ import annotations

import numpy as np
import pytest

from kvscope_app.session.time_span import TimeSpan
from kvscope_app.views.heatmap.address_rows import NO_ADDRESS, highest, spread
from kvscope_app.views.heatmap.key_store import KeyStore
from kvscope_app.views.heatmap.measures import NO_RUNS, num_sizes, run_keys, size_text
from kvscope_app.views.heatmap.time_frame import Stance, TimeFrame
from kvscope_app.views.heatmap.time_scale import FIRST_COLUMN_NS, TimeScale
from kvscope_telemetry.ledger import Ledger
from kvscope_telemetry.summaries.address_bins import bin_edges
from kvscope_telemetry.summaries.run_figures import fragmentation_of
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary


def key_of_second(overview, places):
    """One cell a second: its number."""
    return (overview.time_ns[places] // SECOND_NS % 251 + 1).astype(np.uint8)[:, None]


@pytest.fixture
def add(overview, begin_ns):
    """`add(3, 4)`: empty seconds."""

    def add(*indexes, step=0):
        overview.extend(Summary(time_ns=begin_ns + i * SECOND_NS, epoch=1, step=step) for i in indexes)

    return add


def expected(overview, scale):
    columns = np.zeros(scale.width, np.uint8)
    for time_ns in overview.time_ns.tolist():
        key = int(time_ns // SECOND_NS % 251 + 1)
        for column in range(scale.width):
            begin = (scale.first + column) * scale.column_ns
            if time_ns < begin + scale.column_ns and time_ns + SECOND_NS > begin:
                columns[column] = max(columns[column], key)
    return columns


@pytest.mark.parametrize("column_ns", [SECOND_NS // 7, SECOND_NS, SECOND_NS * 5 // 2, SECOND_NS * 9])
def test_columns_have_the_highest_of_their_seconds(overview, add, begin_ns, column_ns):
    add(*range(10), *range(14, 33), 40)
    store = KeyStore(key_of_second, 1)
    assert store.follow(overview) == begin_ns
    scale = TimeScale(begin_ns // column_ns - 3, 60, column_ns)
    assert np.array_equal(store.columns(scale, 0, 60)[:, 0], expected(overview, scale))
    assert np.array_equal(store.columns(scale, 20, 31)[:, 0], expected(overview, scale)[20:31])


def test_a_overview_that_grows_and_forgets_is_followed(overview, add, begin_ns, rng):
    store = KeyStore(key_of_second, 1)
    scale = TimeScale(begin_ns // SECOND_NS, 400, SECOND_NS)
    last = -1
    for _ in range(60):
        last += int(rng.integers(0, 4))
        add(last)
        if rng.random() < 0.2:
            overview.forget_before(begin_ns + (last - 30) * SECOND_NS)
        store.follow(overview)
        assert np.array_equal(store.columns(scale, 0, 400)[:, 0], expected(overview, scale))
    assert store.follow(overview) is None
    add(last - 5)  # a clock that went back: what came after is gone
    assert store.follow(overview) is not None
    assert np.array_equal(store.columns(scale, 0, 400)[:, 0], expected(overview, scale))


def test_a_long_overview_is_thinned_out_and_misses_no_key(overview, add, begin_ns):
    store = KeyStore(key_of_second, 1, max_rows=16)
    for begin in range(0, 100, 10):
        add(*range(begin, begin + 10))
        store.follow(overview)
        assert len(store) <= 16
    scale = TimeScale(begin_ns // (SECOND_NS * 100), 2, SECOND_NS * 100)
    assert store.columns(scale, 0, 2).max() == expected(overview, scale).max()
    fine = TimeScale(begin_ns // SECOND_NS, 100, SECOND_NS)
    assert np.all(store.columns(fine, 0, 100)[:, 0] >= expected(overview, fine))


def test_another_overview_is_taken_anew(overview, add, begin_ns):
    add(1, 2, 3)
    store = KeyStore(key_of_second, 1)
    store.follow(overview)
    other = type(overview)()
    other.extend([Summary(time_ns=begin_ns + 90 * SECOND_NS, epoch=1)])
    store.follow(other)
    assert len(store) == 1
    assert store.first_ns == begin_ns + 90 * SECOND_NS


@pytest.mark.parametrize(
    ("own", "wanted"), [(5, 5), (5, 9), (700, 1_500), (3_000, 5_000), (3_000, 100_001), (1, 4_000)]
)
def test_bins_are_spread_over_the_addresses_of_a_larger_pool(own, wanted, rng):
    keys = rng.integers(2, 250, (2, min(own, 1024))).astype(np.uint8)
    result = spread(keys, own, wanted)
    own_edges, edges = bin_edges(own), bin_edges(wanted)
    assert result.shape == (2, len(edges) - 1)
    for cell in range(result.shape[1]):
        touched = [
            bin_
            for bin_ in range(keys.shape[1])
            if own_edges[bin_] < edges[cell + 1] and own_edges[bin_ + 1] > edges[cell]
        ]
        for row in range(2):
            assert result[row, cell] == (keys[row, touched].max() if touched else NO_ADDRESS)


def test_the_highest_of_ranges(rng):
    keys = rng.integers(1, 250, (30, 3)).astype(np.uint8)
    starts, ends = np.array([0, 3, 3, 7, 29, 30, 40]), np.array([3, 3, 9, 30, 30, 30, 50])
    result = highest(keys, starts, ends, axis=0)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        wanted = keys[start:end].max(axis=0) if end > start and start < 30 else np.zeros(3)
        if start < 30:
            assert np.array_equal(result[row], wanted)
    assert np.array_equal(highest(keys.T, starts, ends, axis=1), result.T)
    assert highest(keys[:0], starts, ends, axis=0).shape == (7, 3)


def test_a_scale_keeps_the_moment_that_is_zoomed_at(begin_ns):
    scale = TimeScale(begin_ns // SECOND_NS, 500, SECOND_NS)
    for factor in (1.25, 5.0, 0.2, 1e9, 1e-9):
        zoomed = scale.zoomed(factor, 123)
        assert abs(zoomed.x_of(scale.time_at(123)) - 123) <= 1
    fitted = scale.fitted(begin_ns, begin_ns + 7_200 * SECOND_NS)
    assert fitted.begin_ns <= begin_ns
    assert fitted.end_ns >= begin_ns + 7_200 * SECOND_NS
    assert fitted.end_ns - fitted.begin_ns < 8_000 * SECOND_NS
    assert scale.fitted(begin_ns, begin_ns + SECOND_NS).column_ns == FIRST_COLUMN_NS


def test_a_frame_that_fits_moves_rarely(qapp, begin_ns):
    frame = TimeFrame()
    frame.set_width(500)
    scales = set()
    for seconds in range(1, 2_000):
        frame.set_range(begin_ns, begin_ns + seconds * SECOND_NS)
        assert frame.scale.begin_ns <= begin_ns
        assert frame.scale.end_ns >= begin_ns + seconds * SECOND_NS
        scales.add(frame.scale)
    assert len(scales) < 60
    assert frame.stance is Stance.FIT
    frame.pan(10_000)
    assert frame.scale.end_ns > begin_ns, "some of it stays in sight"


def test_measures_of_a_pool(overview, second, begin_ns):
    ledger = Ledger(64)
    ledger.state[::2] = 1
    ledger.filled[::2] = 4
    overview.extend([second(0, ledger)])  # 32 free blocks, each alone; 4 of 16 slots used
    ledger.state[:] = 1
    overview.extend([second(1, ledger)])  # none free
    ledger.state[:] = 0
    overview.extend([second(2, ledger)])  # all free
    np.testing.assert_allclose(fragmentation_of(overview), [1 - 1 / 32, np.nan, 0])
    keys = run_keys(overview, np.arange(3), num_sizes(64))
    assert keys.shape == (3, 7)
    assert keys[0].tolist() == [NO_RUNS] * 6 + [NO_RUNS + 6]  # 32 runs of 1
    assert keys[1].tolist() == [NO_RUNS] * 7
    assert keys[2].tolist() == [NO_RUNS + 1] + [NO_RUNS] * 6
    assert [size_text(power) for power in range(3)] == ["1", "2 to 3", "4 to 7"]


def test_a_range_that_is_asked_for_fills_the_width():
    frame = TimeFrame()
    frame.set_width(600)
    begin_ns = 1_000 * SECOND_NS
    frame.set_range(begin_ns, begin_ns + 3_600 * SECOND_NS)
    for seconds in (50, 900):
        frame.show_only(TimeSpan(begin_ns + SECOND_NS, begin_ns + (1 + seconds) * SECOND_NS))
        assert frame.scale.begin_ns <= begin_ns + SECOND_NS
        assert seconds <= (frame.scale.end_ns - begin_ns) / SECOND_NS - 1 < seconds * 1.02
        assert frame.stance is Stance.STAND
