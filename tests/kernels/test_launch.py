"""Tiles have sizes that Triton supports, and hold what they must."""

from hypothesis import given
from hypothesis import strategies as st

from kvscope_kernels.launch import decode_tiles, prefill_tiles

POWERS_OF_TWO = {1 << n for n in range(12)}


@given(
    st.integers(1, 256),
    st.integers(1, 256),
    st.integers(1, 32),
    st.sampled_from([2, 4]),
    st.integers(1, 5000),
    st.sampled_from([80, 86, 89, 90, 100, 120]),
)
def test_tile_sizes_are_supported_by_triton(
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


def test_prefill_uses_large_tiles_if_its_queries_fill_the_gpu() -> None:
    """With heads of 128 on Hopper there are two programs for each multiprocessor, from one long run or from many."""
    runs = {(2048, 64): 256, (2048, 8): 64, (8192, 8): 256, (256, 128): 256, (512, 8): 64, (3, 8): 16}
    assert {run: prefill_tiles(128, 128, 4, 2, run[0], 90, num_runs=run[1]).tile_m for run in runs} == runs
    assert prefill_tiles(128, 128, 4, 2, 2048, 80, num_runs=64).tile_m == 128
