"""Bounds of a decode launch: enough parts to fill the device, and limited memory for partial results."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope_kernels.decode.bounds import MAX_PART_TOKENS, part_bounds, partial_bytes

H100 = 132
TILE_N = 32


def num_parts(lengths: list[int], num_kv_heads: int, max_visible: int = 0) -> list[int]:
    """Return the number of parts of each request, by the formula of `plan_decode`."""
    bounds = part_bounds(len(lengths), max_visible or max(lengths), num_kv_heads, TILE_N, H100)
    if not bounds.num_cuts:
        return [1] * len(lengths)
    total = sum(lengths)
    filling = min(-(-total // bounds.num_filling), MAX_PART_TOKENS)
    longest = max(bounds.min_tokens, -(-total // bounds.num_cuts), filling)
    parts = [-(-max(length, 1) // longest) for length in lengths]
    sizes = [-(-max(length, 1) // (n * TILE_N)) * TILE_N for length, n in zip(lengths, parts, strict=True)]
    return [-(-max(length, 1) // size) for length, size in zip(lengths, sizes, strict=True)]


@given(st.lists(st.integers(0, 1 << 17), min_size=1, max_size=40), st.integers(1, 40), st.integers(0, 1 << 17))
def test_split_decode_parts_fit_the_launch_bounds_for_all_lengths(
    lengths: list[int], num_kv_heads: int, beyond: int
) -> None:
    most = max(lengths) + beyond
    bounds = part_bounds(len(lengths), most, num_kv_heads, TILE_N, H100)
    assert sum(num_parts(lengths, num_kv_heads, most)) <= bounds.num_parts
    assert bounds.min_tokens % TILE_N == 0


@pytest.mark.parametrize(
    ("lengths", "num_kv_heads", "at_least", "at_most"),
    [
        ([32768], 8, 1.5 * H100, 4 * H100),  # one request fills the device alone
        ([4096] * 8, 8, 1.5 * H100, 4 * H100),
        ([4096] * 64, 8, 8 * H100, 16 * H100),
        (
            [131072] + [100] * 255,
            8,
            8 * (255 + 64),
            8 * (255 + 132),
        ),  # a long request among short ones is split into small parts
        ([100] * 64, 8, 8 * 64, 8 * 64),  # whole: nothing to merge
        ([100], 3, 3 * 2, 3 * 2),  # none but the last is shorter than two tiles
    ],
)
def test_split_decode_fills_the_gpu_without_too_many_programs(
    lengths: list[int], num_kv_heads: int, at_least: float, at_most: float
) -> None:
    assert at_least <= sum(num_parts(lengths, num_kv_heads)) * num_kv_heads <= at_most


def test_graph_for_any_length_is_limited_by_the_device_and_its_batch() -> None:
    """There are 256 requests of up to 131,072 tokens."""
    bounds = part_bounds(256, 1 << 17, 8, TILE_N, H100)
    programs, kept = bounds.num_parts * 8, partial_bytes(bounds, 32, 128)
    print(f"{programs} programs, {kept} bytes; cut for the longest: {256 * 8 * 64} and {256 * 32 * 64 * 129 * 4}")
    assert programs <= 256 * 8 + 8 * H100 + 8
    assert kept <= 8 << 20
    one = part_bounds(1, 1 << 17, 8, TILE_N, H100)
    assert one.num_parts * 8 <= 4 * H100 + 8 + 8, "a graph of one request launches too many empty programs"


def test_unsplit_requests_need_no_partial_memory() -> None:
    assert partial_bytes(part_bounds(64, 1024, 8, TILE_N, H100), 32, 128) == 0
    assert partial_bytes(part_bounds(1, 64, 8, TILE_N, H100), 32, 128) == 0
    assert partial_bytes(part_bounds(1, 65, 8, TILE_N, H100), 32, 128) > 0


@pytest.mark.parametrize(
    ("max_queries", "num_warps", "rows", "at_least"),
    [
        (16, 4, 64, 0.95),
        (48, 4, 64, 0.95),
        (64, 4, 64, 0.95),
        (80, 4, 64, 0.95),
        (128, 4, 64, 0.95),
        (64, 8, 128, 0.95),
    ],
)
def test_parts_of_one_request_fill_the_device_in_whole_rounds(
    max_queries: int, num_warps: int, rows: int, at_least: float
) -> None:
    """Queries of 32 heads over 32k tokens on an H100: the rows of a tile are 4 heads of a query."""
    programs_each, fill = 8 * -(-max_queries * 4 // rows), 8 // num_warps * H100
    for visible in (2048, 8192, 32768, 131072):
        before = part_bounds(1, visible, programs_each, 64, H100, num_warps)
        bounds = part_bounds(1, visible, programs_each, 64, H100, num_warps, is_compute_bound=True)
        programs = bounds.num_cuts * programs_each
        assert programs / (-(-programs // fill) * fill) >= min(at_least, _filled(before.num_cuts, programs_each, fill))
        assert bounds.num_cuts <= before.num_cuts, "more memory than planned"
        assert bounds.num_filling == bounds.num_cuts, "the number of parts depends on the length"


def _filled(parts: int, programs_each: int, fill: int) -> float:
    return max(n * programs_each / (-(-n * programs_each // fill) * fill) for n in range(1, parts + 1))


def test_compute_bound_kernels_do_not_change_the_split_of_several_requests() -> None:
    given = (2, 32768, 32, 64, H100, 4)
    assert part_bounds(*given, is_compute_bound=True) == part_bounds(*given)
