"""The tile search with a fake kernel and clock, and real kernels with other tiles."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.compile_report.cases import candidate_cases
from kvscope_engine.bench.kernels.contest import CallCycle
from kvscope_engine.bench.kernels.tile_search import CASES, candidates, default_tiles, kernel_of, search
from kvscope_kernels.attention_args import AttentionArgs
from kvscope_kernels.attention_workload import AttentionWorkload, make_pool
from kvscope_kernels.launch import DotTiles, decode_tiles
from kvscope_kernels.tuning.tile_table import DECODE, from_entry, measured_tiles

WORK = AttentionWorkload(name="w", seq_lens=(20, 20), num_heads=8, num_kv_heads=2, head_dim=64)
GIVEN = decode_tiles(64, 64, 4, 2)


def tuned_tiles() -> DotTiles:
    return measured_tiles(DECODE, GIVEN, 4, 2, torch.device("cpu"), is_quantized=False)


def search_result(seconds: Callable[[DotTiles], float], refuses: Callable[[DotTiles], bool] = lambda _: False) -> Any:
    def decode(args: AttentionArgs, *_: Any) -> torch.Tensor:
        if refuses(tuned_tiles()):
            raise RuntimeError("out of resource: shared memory")
        return args.out_or_new().fill_(2.0 if tuned_tiles().num_stages == 3 else 1.0)

    def sampler(contender: CallCycle) -> Callable[[], float]:
        return lambda: seconds(tuned_tiles())

    ops: Any = SimpleNamespace(decode=decode)
    return search(WORK, [make_pool(WORK, "cpu")], ops, sampler, lambda *_: None)


def test_fastest_correct_tiles_win() -> None:
    found = search_result(
        lambda tiles: 1.0 / tiles.tile_n / tiles.num_warps, refuses=lambda tiles: tiles.num_warps == 8
    )
    assert (found.best.tile_n, found.best.num_warps) == (128, 4)
    assert found.best.num_stages != 3, "the fake kernel is wrong with three stages"
    assert found.is_worth_it
    assert found.num_refused > found.num_tried // 3
    assert from_entry(found.entry(), GIVEN, 4) == found.best


def test_gain_within_the_noise_is_ignored() -> None:
    found = search_result(lambda tiles: 1.0 if tiles == GIVEN else 0.99)
    assert not found.is_worth_it


def test_tile_search_raises_an_error_if_the_default_tiles_fail() -> None:
    with pytest.raises(RuntimeError, match="out of resource"):
        search_result(lambda tiles: 1.0, refuses=lambda tiles: True)


@pytest.mark.parametrize("capability", [89, 90])
def test_candidates_fit_their_shapes_and_are_distinct(capability: int) -> None:
    for work in CASES:
        group, given = work.num_heads // work.num_kv_heads, default_tiles(work, torch.device("cpu"))
        found = list(candidates(kernel_of(work), given, group, capability))
        assert found[0] == given
        assert len(set(found)) == len(found) <= 82
        assert all(tiles.tile_m >= group for tiles in found)


def test_candidates_for_a_short_chunk_include_reading_its_keys_once() -> None:
    """64 queries of 4 heads per KV head are 256 rows; on compute capability 9 some candidates keep them in
    registers.
    """
    tried = list(candidate_cases(90))
    shapes = {(launch.constants["TILE_M"], launch.constants["QUERY_IN_REGISTERS"]) for launch in tried}
    assert {(256, False), (256, True), (64, True)} <= shapes
    assert all(launch.constants["IS_CUT"] for launch in tried)
    assert not any(launch.constants["QUERY_IN_REGISTERS"] for launch in candidate_cases(89))
