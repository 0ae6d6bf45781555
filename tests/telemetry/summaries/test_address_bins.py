"""Address bins and free runs compared with plain counting."""

from __future__ import annotations

from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope_telemetry.ledger import NO_OWNER, BlockState, Ledger
from kvscope_telemetry.summaries.address_bins import bin_edges, bin_rows, count_by_size, free_run_lengths
from kvscope_telemetry.summaries.summary import MAX_BINS, AddressBins

states = st.lists(st.sampled_from([int(state) for state in BlockState]), max_size=60)


@given(states)
def test_free_run_lengths_match_groupby(values: list[int]) -> None:
    expected = [len(list(run)) for state, run in groupby(values) if state == BlockState.FREE]
    assert free_run_lengths(np.array(values, np.uint8)).tolist() == expected


def test_free_block_runs_are_counted_by_power_of_two() -> None:
    assert count_by_size(np.array([1, 1, 2, 3, 4, 9])) == (2, 2, 1, 1)
    assert count_by_size(np.empty(0, np.int64)) == ()
    assert sum(count_by_size(np.array([1 << 40]))) == 1


@pytest.mark.parametrize("num_rows", [0, 1, 3, MAX_BINS - 1, MAX_BINS, MAX_BINS + 1, 5000, 1_000_003])
def test_address_bins_have_nearly_equal_size_and_cover_all_blocks(num_rows: int) -> None:
    edges = bin_edges(num_rows)
    sizes = np.diff(edges)
    assert (edges[0], edges[-1]) == (0, num_rows)
    assert len(sizes) == min(num_rows, MAX_BINS)
    assert not len(sizes) or sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("num_rows", [5, 1024, 3000])
def test_address_bin_summarizes_the_state_of_its_blocks(num_rows: int) -> None:
    random = np.random.default_rng(num_rows)
    ledger = Ledger(num_rows)
    ledger.state[:] = random.integers(0, 3, num_rows)
    ledger.owner[:] = random.integers(-1, 50, num_rows)
    ledger.ref_count[:] = random.integers(0, 3, num_rows)
    ledger.filled[:] = random.integers(0, 17, num_rows)
    bins = bin_rows(ledger, 16)
    edges = bin_edges(num_rows)
    owner = np.frombuffer(bins.owner, "<i4")
    active, filled = np.frombuffer(bins.active, "u1"), np.frombuffer(bins.filled, "u1")
    shared = np.frombuffer(bins.shared, "u1")
    for place, (first, last) in enumerate(pairwise(edges)):
        is_active = ledger.state[first:last] == BlockState.ACTIVE
        owners = ledger.owner[first:last][is_active]
        assert owner[place] == owners.max(initial=NO_OWNER)
        assert (active[place] == 0) == (not is_active.any())
        assert abs(active[place] - 255 * is_active.mean()) <= 1
        assert abs(filled[place] - 255 * ledger.filled[first:last].sum() / (16 * (last - first))) <= 1
        assert (shared[place] == 0) == (ledger.ref_count[first:last] <= 1).all()


def test_single_active_row_among_millions_is_visible() -> None:
    ledger = Ledger(4_000_000)
    ledger.state[1_234_567] = BlockState.ACTIVE
    assert sum(bin_rows(ledger, 16).active) == 1
    assert bin_rows(Ledger(0), 16) == AddressBins()
