"""Searches tile sizes for attention kernels.

Candidates with a correct result are timed, and the fastest is selected if the gain exceeds timing noise.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final

import torch

from kvscope_engine.bench.kernels.calls import decode_call, prefill_call
from kvscope_engine.bench.kernels.contest import CallCycle, Sampler
from kvscope_kernels.attention_workload import AttentionWorkload, Pool
from kvscope_kernels.dispatch import Ops
from kvscope_kernels.graph_timing import Call
from kvscope_kernels.launch import DotTiles, compute_capability, decode_tiles, num_multiprocessors, prefill_tiles
from kvscope_kernels.tuning.tile_table import DECODE, PREFILL, as_entry, forced_tiles, table_key

_MAX_TIME_RATIO: Final = 0.97
"""Maximum time relative to the default tiles for which new tiles are selected, so that the gain exceeds timing noise.
"""
_ROUNDS: Final = 5
_MAX_REGISTERS_FOR_THREE_PROGRAMS: Final = 168
"""Maximum registers per thread with which three programs of four warps fit on a multiprocessor. 64 x 32 tiles compile
without spills at this limit.
"""
_NUM_FINALISTS: Final = 3
"""Number of the fastest candidates that are measured again in interleaved rounds, in addition to the default tiles."""
_TOLERANCE: Final = 0.02


def _cases() -> Iterator[AttentionWorkload]:
    shapes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("32/8/128", {}),
        ("9/3/64", {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}),
        ("8/4/256", {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256}),
        ("64/8/64", {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64}),
    )
    for (name, heads), kv_dtype in product(shapes, (None, torch.int8)):  # tables do not distinguish int8 and fp8
        yield AttentionWorkload(name=name, seq_lens=(4096,) * 32, kv_dtype=kv_dtype, **heads)
        yield AttentionWorkload(name=name, seq_lens=(2048,) * 4, query_lens=(2048,) * 4, kv_dtype=kv_dtype, **heads)
        yield AttentionWorkload(name=name, seq_lens=(32768,), query_lens=(64,), kv_dtype=kv_dtype, **heads)


CASES: Final = tuple(_cases())


@dataclass(frozen=True, slots=True)
class TileSearchResult:
    key: str
    default: DotTiles
    best: DotTiles
    default_us: float
    best_us: float
    num_tried: int
    num_refused: int
    """Number of candidates that did not compile, did not fit, or computed a wrong result."""

    @property
    def is_worth_it(self) -> bool:
        return self.best_us < _MAX_TIME_RATIO * self.default_us

    def entry(self) -> dict[str, Any]:
        """Return the entry for the tile table, including the times that led to the choice."""
        times = {"us": round(self.best_us, 2), "reckoned_us": round(self.default_us, 2)}
        return as_entry(self.best) | times


def kernel_of(work: AttentionWorkload) -> str:
    return DECODE if work.query_lens is None else PREFILL


def splits_keys(work: AttentionWorkload) -> bool:
    """Whether the workload is a short run of tokens after a context, for which the keys are split among programs."""
    return work.query_lens is not None and max(work.query_lens) < min(work.seq_lens)


def default_tiles(work: AttentionWorkload, device: torch.device) -> DotTiles:
    """Return the tiles that a launch uses if there is no tile table."""
    group, is_quantized = work.num_heads // work.num_kv_heads, work.kv_dtype is not None
    shape = work.head_dim, work.head_dim, group, work.dtype.itemsize
    if work.query_lens is None:
        return decode_tiles(*shape, is_quantized=is_quantized)
    return prefill_tiles(
        *shape,
        max(work.query_lens),
        compute_capability(device),
        num_runs=len(work.query_lens) * work.num_kv_heads,
        multiprocessors=num_multiprocessors(device),
        is_quantized=is_quantized,
    )


def candidates(kernel: str, default: DotTiles, group: int, capability: int) -> Iterator[DotTiles]:
    yield default
    rows = (default.tile_m,) if kernel == DECODE else (64, 128, 256)
    warps = (2, 4, 8) if kernel == DECODE else (4, 8, 16)
    stages = (2, 3, 4, 5) if kernel == DECODE else (2, 3, 4)
    for tile_m, tile_n, num_warps, num_stages in product(rows, (16, 32, 64, 128), warps, stages):
        tiles = default._replace(tile_m=tile_m, tile_n=tile_n, num_warps=num_warps, num_stages=num_stages)
        has_valid_shape = kernel == DECODE or (tile_n >= 32 and tile_m >= 16 * num_warps)
        if tiles != default and tile_m >= group and has_valid_shape:
            yield tiles
        if kernel == PREFILL and 90 <= capability < 100 and has_valid_shape and tile_n < 128 and num_stages < 4:
            yield tiles._replace(query_in_registers=True)
            if tile_m == 64 and tile_n == 32:
                yield tiles._replace(max_registers=_MAX_REGISTERS_FOR_THREE_PROGRAMS)


def search(
    work: AttentionWorkload,
    pools: list[Pool],
    ops: Ops,
    make_sampler: Callable[[CallCycle], Sampler],
    show_progress: Callable[[int, int], None],
) -> TileSearchResult:
    """Measure every candidate on the pools, and return the fastest that computes the correct result.

    Raises any exception of the default tiles; other failing candidates are skipped. `show_progress` is called with
    (number tried, total).
    """
    kernel, group = kernel_of(work), work.num_heads // work.num_kv_heads
    default = default_tiles(work, pools[0].query.device)
    make_call = decode_call if work.query_lens is None else prefill_call
    calls = [make_call(ops, pool) for pool in pools]
    times: dict[DotTiles, float] = {}
    samplers: dict[DotTiles, Sampler] = {}
    expected: torch.Tensor | None = None
    tried_tiles = list(candidates(kernel, default, group, compute_capability(pools[0].query.device)))
    for number, tiles in enumerate(tried_tiles):
        show_progress(number, len(tried_tiles))
        try:
            with forced_tiles(kernel, tiles):
                result = _result(calls[0])
                if expected is not None and not _is_close(result, expected):
                    continue
                expected = result if expected is None else expected
                samplers[tiles] = partial(_sample, kernel, tiles, make_sampler(CallCycle(calls)))
            times[tiles] = min(samplers[tiles](), samplers[tiles]())
        except Exception:  # compiler, assembler and driver raise many types of errors
            if tiles == default:
                raise
    finalists = list(dict.fromkeys((default, *sorted(times, key=times.__getitem__)[:_NUM_FINALISTS])))
    best_us = dict.fromkeys(finalists, float("inf"))
    for _ in range(_ROUNDS):
        for tiles in finalists:
            best_us[tiles] = min(best_us[tiles], samplers[tiles]() * 1e6)
    best = min(best_us, key=best_us.__getitem__)
    is_quantized = work.kv_dtype is not None
    key = table_key(kernel, default, group, work.dtype.itemsize, is_quantized=is_quantized, is_cut=splits_keys(work))
    return TileSearchResult(
        key, default, best, best_us[default], best_us[best], len(tried_tiles), len(tried_tiles) - len(times)
    )


def _result(call: Call) -> torch.Tensor:
    result = call()
    assert isinstance(result, torch.Tensor), "attention returns what it computed"
    return result.clone()


def _sample(kernel: str, tiles: DotTiles, sampler: Sampler) -> float:
    """Run a sampler with `tiles` forced.

    Without a CUDA graph, each call selects its tiles again, so they must be forced while sampling. A CUDA graph
    contains the tiles selected at its capture.
    """
    with forced_tiles(kernel, tiles):
        return sampler()


def _is_close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    difference = (result.float() - expected.float()).abs().max()
    return bool(difference <= _TOLERANCE * expected.float().abs().max())
