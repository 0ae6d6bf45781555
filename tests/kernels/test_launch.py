"""Splits cover every token once, fill the device, and stay within their bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope_kernels.launch import decode_tiles, plan_splits, prefill_tiles

POWERS_OF_TWO = {1 << n for n in range(12)}


@given(st.integers(0, 1 << 20), st.integers(1, 4096), st.sampled_from([16, 32, 64]), st.integers(1, 200))
def test_splits_cover_all_that_is_visible(visible: int, heads: int, tile_n: int, processors: int) -> None:
    plan = plan_splits(visible, heads, tile_n, processors)
    assert plan.num_splits >= 1
    assert plan.num_splits * plan.split_tokens >= visible
    assert (plan.num_splits - 1) * plan.split_tokens < max(visible, 1)
    assert plan.split_tokens % tile_n == 0
    assert 2 * tile_n <= plan.split_tokens <= max(1024, visible // 64 + tile_n), "a part is short, or one of 64"


@pytest.mark.parametrize(
    ("visible", "heads", "at_least", "at_most"),
    [
        (32768, 8, 250, 500),  # one request fills 132 multiprocessors
        (4096, 8 * 8, 250, 550),
        (32768, 8 * 32, 32 * 256, 32 * 256),  # a long request among short ones is cut small all the same
        (100, 8 * 64, 512, 512 * 2),
    ],
)
def test_programs_on_132_multiprocessors(visible: int, heads: int, at_least: int, at_most: int) -> None:
    num_programs = plan_splits(visible, heads, 32, 132).num_splits * heads
    assert at_least <= num_programs <= at_most


@given(
    st.integers(1, 256),
    st.integers(1, 256),
    st.integers(1, 32),
    st.sampled_from([2, 4]),
    st.integers(1, 5000),
    st.sampled_from([80, 86, 89, 90, 100, 120]),
)
def test_tiles_are_what_triton_takes(
    head_dim: int, value_dim: int, group: int, element_bytes: int, max_query_len: int, capability: int
) -> None:
    decode = decode_tiles(head_dim, value_dim, group, element_bytes)
    prefill = prefill_tiles(head_dim, value_dim, group, element_bytes, max_query_len, capability)
    for tiles in (decode, prefill):
        assert {tiles.tile_m, tiles.tile_n, tiles.tile_d, tiles.tile_v} <= POWERS_OF_TWO
        assert min(tiles.tile_m, tiles.tile_n, tiles.tile_d, tiles.tile_v) >= 16
        assert tiles.tile_m >= group
        assert tiles.tile_d >= head_dim
        assert tiles.tile_v >= value_dim
