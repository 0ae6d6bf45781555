"""Attention kernels give the same result with other tiles."""

from __future__ import annotations

from typing import Any

import pytest

from kvscope_kernels.launch import prefill_tiles
from kvscope_kernels.tuning.tile_table import DECODE, PREFILL, forced_tiles


@pytest.mark.parametrize(("tile_m", "tile_n"), [(16, 16), (32, 64)])
def test_attention_kernels_with_other_tile_sizes_give_the_same_result(
    tile_m: int, tile_n: int, runner: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    given = prefill_tiles(64, 64, 3, 4, 40, 90)._replace(tile_m=tile_m, tile_n=tile_n, query_in_registers=tile_m == 32)
    batch = build(shape(seq_lens=[40, 17], query_lens=[21, 17]), runner.device)
    with forced_tiles(PREFILL, given):
        assert_close(batch.prefill(runner.ops), reference(batch))
    alone = build(shape(seq_lens=[40, 17]), runner.device)
    with forced_tiles(DECODE, given):
        assert_close(alone.decode(runner.ops), reference(alone))
