"""Launch parameters shared by the attention kernels. They depend on shapes and the device, never on data."""

from typing import Final, NamedTuple

import torch

from kvscope_kernels.triton_language import cdiv, next_power_of_2

UNBOUNDED: Final = 2**31 - 1
"""Value of the sliding window for a layer without one."""


_FIXED_ROWS: Final = 64
_LARGE_ROWS: Final = 256
_MIN_LARGE_PROGRAMS_PER_MULTIPROCESSOR: Final = 2
"""Minimum number of programs with large tiles per multiprocessor for which large tiles are faster."""


class DotTiles(NamedTuple):
    """Tile of one program: TILE_M query rows by TILE_N tokens; head dims padded to powers of two."""

    tile_m: int
    tile_n: int
    tile_d: int
    tile_v: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Maximum number of registers per thread; None for no limit. A limit also prevents the assembler from
    choosing fewer registers, and spilling a few bytes, so that one more program fits.
    """
    query_in_registers: bool = False
    """Whether prefill multiplies query rows from registers on compute capability 9, which halves the reads of shared
    memory for scores.

    No table shipped with kvscope enables it. `bench kernels --tune` tries it, and may enable it in the user's table.
    """


def decode_tiles(
    head_dim: int, value_dim: int, group: int, element_bytes: int, *, is_quantized: bool = False
) -> DotTiles:
    """Return the tiles of decode, which is memory-bound: few rows (the query heads of one KV head), and small tiles in
    a deep pipeline.

    Two of the five stages are for the block table's lookup, so that two tiles are in flight after the current one.
    Heads above 256 in float32 have four stages, which fit into 99 KiB. 8-bit keys and values are dequantized in
    registers; for them, twice the tokens per tile and half the warps are 1.2 to 1.5 times as fast on an H100.
    Dequantized to float32, they would not fit in registers.
    """
    is_widened = is_quantized and element_bytes < 4
    tile_n = _tile_tokens(head_dim, value_dim, element_bytes, (32 << 10) if is_widened else (16 << 10))
    tile_m = max(16, next_power_of_2(group))
    num_warps = 2 if is_widened else 4
    tile_d, tile_v = padded_dim(head_dim), padded_dim(value_dim)
    num_stages = 4 if element_bytes == 4 and max(tile_d, tile_v) > 256 else 5
    return DotTiles(tile_m, tile_n, tile_d, tile_v, num_warps, num_stages)


def prefill_tiles(
    head_dim: int,
    value_dim: int,
    group: int,
    element_bytes: int,
    max_query_len: int,
    capability: int,
    *,
    num_runs: int = 1,
    multiprocessors: int = 132,
    is_quantized: bool = False,
) -> DotTiles:
    """Return the tiles of prefill.

    A tile's rows are query tokens times heads of a KV head: 16 for few queries, 64 to 256 for prompts. `num_runs` is
    the number of requests times the number of KV heads.

    Registers limit the tile size: those of the query tile before compute capability 9.0 and on 12.0, whose matrix units
    are similar; those of scores on 10.0; and those of all operands in float32, whose dot products are exact but do not
    use the matrix units. 8-bit keys and values are dequantized in registers too. `compile_report` shows that only the
    largest tiles spill.
    """
    tile_d, tile_v = padded_dim(head_dim), padded_dim(value_dim)
    min_rows = max(16, next_power_of_2(group))
    num_rows = max(max_query_len, 1) * group
    if element_bytes == 4:
        return DotTiles(min_rows, 16, tile_d, tile_v, num_warps=4, num_stages=2)
    is_wide = max(tile_d, tile_v) > 128
    is_hopper, is_blackwell = 90 <= capability < 100, 100 <= capability < 120
    is_widened = is_quantized and (is_hopper or (max(tile_d, tile_v) > 64 and not is_blackwell))
    max_rows = 64 if is_wide or is_widened else 128
    tile_m = max(min_rows, min(max_rows, next_power_of_2(num_rows)))
    if is_hopper and not is_quantized and 64 < max(tile_d, tile_v) <= 128:
        is_large = cdiv(num_rows, _LARGE_ROWS) * num_runs >= _MIN_LARGE_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
        return _hopper_tiles_of_128(num_rows, min_rows, tile_d, tile_v, is_large=is_large)
    if is_hopper:
        return _hopper_prefill_tiles(tile_m, tile_d, tile_v, element_bytes, is_quantized=is_quantized)
    tile_n = _tile_tokens(head_dim, value_dim, element_bytes, 16 << 10)
    if is_blackwell:
        num_warps = 8 if tile_m >= 128 else 4
        max_registers = 128 if tile_d + tile_v <= 128 else 255
        return DotTiles(tile_m, min(tile_n, 32), tile_d, tile_v, num_warps, 2, max_registers)
    if is_quantized:
        tile_n = min(tile_n, 32)
    num_warps = 8 if tile_m >= 128 or (is_wide and tile_m >= 64) else 4
    is_tight = is_quantized or tile_m <= max(32, min_rows)  # else small tiles spill
    return DotTiles(tile_m, tile_n, tile_d, tile_v, num_warps, 3, max_registers=255 if is_tight else None)


def fixed_prefill_tiles(
    head_dim: int, value_dim: int, group: int, element_bytes: int, capability: int, *, is_quantized: bool = False
) -> DotTiles:
    """Return tiles that do not depend on the number and length of prompts (`QueryRuns.is_fixed`). A single
    token does not fill such a tile.
    """
    max_queries = max(1, _FIXED_ROWS // group)
    tiles = prefill_tiles(head_dim, value_dim, group, element_bytes, max_queries, capability, is_quantized=is_quantized)
    return tiles._replace(max_registers=tiles.max_registers or 255)


def _hopper_tiles_of_128(num_rows: int, min_rows: int, tile_d: int, tile_v: int, *, is_large: bool) -> DotTiles:
    """Return the prefill tiles for head dim 128, as measured on an H100.

    Large tiles are 1.1 to 1.2 times as fast if there are enough programs for all multiprocessors, although each thread
    spills some bytes. Two programs with small tiles fit a multiprocessor.
    """
    if is_large:
        return DotTiles(_LARGE_ROWS, 64, tile_d, tile_v, num_warps=16, num_stages=2)
    return DotTiles(max(min_rows, min(64, next_power_of_2(num_rows))), 64, tile_d, tile_v, num_warps=4, num_stages=3)


def _hopper_prefill_tiles(tile_m: int, tile_d: int, tile_v: int, element_bytes: int, *, is_quantized: bool) -> DotTiles:
    """Return the prefill tiles for head dims other than 128, as measured on an H100: close to the best of ten shapes
    that do not spill.

    8-bit caches need few stages, because they are dequantized in registers. Heads of 64 are 1.5 times as fast with two
    stages as with three, and heads of 256 with four warps as with eight.
    """
    is_wide = max(tile_d, tile_v) > 128
    if is_quantized or is_wide:
        tile_n = _tile_tokens(tile_d, tile_v, element_bytes, (16 << 10) if is_wide else (32 << 10))
        return DotTiles(tile_m, tile_n, tile_d, tile_v, 4, 2, 255 if is_quantized else None)
    tile_n = _tile_tokens(tile_d, tile_v, element_bytes, 32 << 10)
    num_warps, max_registers = (8 if tile_m >= 128 else 4), (255 if tile_m < 64 else None)
    return DotTiles(tile_m, tile_n, tile_d, tile_v, num_warps, 2, max_registers)


class LatentTiles(NamedTuple):
    """Tile of one program over latents: TILE_M rows by TILE_N tokens. A row is a query and a head."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


def latent_tiles(num_rows: int, element_bytes: int, capability: int, *, is_quantized: bool = False) -> LatentTiles:
    """Return the tiles for latent attention (MLA) of a request with `num_rows` rows, the number of its queries times
    its heads.

    A row has as many accumulators as the latent has dimensions, up to 512, which limits the tile: 16 rows and the query
    fit into a warp's registers. If query tiles are in shared memory, 64 rows fit, and each token is read a quarter as
    often. `compile_report` shows that none of these spill.
    """
    if element_bytes == 4:
        return LatentTiles(16, 16, 8 if capability >= 100 or is_quantized else 4, 2)
    if is_quantized:  # dequantized in registers, of which few are left
        return LatentTiles(32, 32, 8, 2) if num_rows >= 32 else LatentTiles(16, 16, 4, 2)
    if num_rows >= 64 and 90 <= capability < 120:
        return LatentTiles(64, 32, 8, 2)
    return LatentTiles(32, 32, 8, 2) if num_rows >= 32 else LatentTiles(16, 32, 4, 2)


def attention_constants(group: int, head_dim: int, value_dim: int, block_size: int, tiles: DotTiles) -> dict[str, int]:
    """Return the constants that both attention kernels derive from shapes and tiles, by name."""
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "TILE_M": tiles.tile_m,
        "TILE_N": tiles.tile_n,
        "TILE_D": tiles.tile_d,
        "TILE_V": tiles.tile_v,
        "BLOCK_SIZE": block_size,
    }


def num_multiprocessors(device: torch.device) -> int:
    """Return the device's number of multiprocessors. A CPU, on which kernels are interpreted, counts as an H100."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def compute_capability(device: torch.device) -> int:
    """Return the device's compute capability, 90 for 9.0. A CPU, on which kernels are interpreted, counts as 9.0."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def has_little_shared(capability: int) -> bool:
    """Whether a program has at most 99 KiB of shared memory.

    True for GeForce and workstation cards, whose matrix units are those of 8.x even on 12.x.
    """
    return capability in (86, 89) or capability >= 120


def padded_dim(head_dim: int) -> int:
    """Return the head dim padded as `tl.dot` requires."""
    return max(16, next_power_of_2(head_dim))


def _tile_tokens(head_dim: int, value_dim: int, element_bytes: int, max_bytes: int) -> int:
    """Return the tokens per tile, a power of two from 16 to 64, such that their keys and values take at most
    `max_bytes`.
    """
    token_bytes = (padded_dim(head_dim) + padded_dim(value_dim)) * element_bytes
    max_fitting = next_power_of_2(max_bytes // token_bytes + 1) // 2
    return min(64, max(16, max_fitting))
