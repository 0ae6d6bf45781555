"""The rule for pinned blocks that engine and desktop share."""

from __future__ import annotations

import pytest

from kvscope_telemetry.pins import max_held_blocks, num_missing


@pytest.mark.parametrize(("window", "expected"), [(0, 63), (32, 11), (10_000, 63)])
def test_maximum_blocks_held_by_a_request_are_limited_by_its_sliding_window(window: int, expected: int) -> None:
    assert max_held_blocks(1000, window=window, max_chunk=128, block_size=16) == expected


def test_missing_blocks_count_pins_except_those_of_its_own_prompt() -> None:
    assert num_missing(num_needed=60, num_own=0, num_usable=64, num_pinned=4) == 0
    assert num_missing(num_needed=60, num_own=0, num_usable=64, num_pinned=6) == 2
    assert num_missing(num_needed=60, num_own=2, num_usable=64, num_pinned=6) == 0
