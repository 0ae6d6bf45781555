"""Tiles are of sizes that Triton takes, and hold what they must."""

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
