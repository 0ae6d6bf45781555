"""Launch shapes that the attention kernels share. Decides from shapes and the device, never from data."""

from typing import Final, NamedTuple

import torch

from kvscope_kernels.triton_language import cdiv, next_power_of_2

UNBOUNDED: Final = 2**31 - 1
"""The sliding window of a layer without one."""


_FIXED_ROWS: Final = 64
_LARGE_ROWS: Final = 256
_PROGRAMS_EACH: Final = 2
"""Of large tiles a multiprocessor, for them to be worth it."""


class DotTiles(NamedTuple):
    """Tile of one program: TILE_M query rows by TILE_N tokens; head dims padded to powers of two."""

    tile_m: int
    tile_n: int
    tile_d: int
    tile_v: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """A thread. Setting it also keeps the assembler from spilling a few bytes to fit one more program."""
    query_in_registers: bool = False
    """Of prefill: whether rows are multiplied from registers on compute capability 9, which reads shared memory half as
    often for scores. No table has it yet: it is for `bench kernels --tune` to find out."""


def decode_tiles(
    head_dim: int, value_dim: int, group: int, element_bytes: int, *, is_quantized: bool = False
) -> DotTiles:
    """Bound by memory: few rows, those of one KV head, and small tiles in a deep pipeline.

    Of the five stages two hold the block table's lookup, so that two tiles are in flight behind the one in use.
    Heads above 256 in float32 have four, which fit into 99 KiB. Keys and values of 8 bits are widened in registers, so
    that a tile is worth twice the tokens and half the warps: on an H100 1.2 to 1.5 times as fast as the other tile.
    Widened to float32 they would not fit in registers.
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
    """Rows are query tokens times the heads of one KV head: 16 for a few queries, 64 to 256 for long prompts.
    `num_runs` is requests times KV heads, each of which has as many rows, or fewer.

    What bounds the tile is registers: those of the query tile before compute capability 9.0 and on 12.0, whose matrix
    units are alike, of the scores on 10.0, and of everything in float32, whose dot products are exact but run without
    the matrix units. Keys and values of 8 bits pass through registers, too, to be widened.
    `compile_report` shows that none of these spill, but for the largest.
    """
    tile_d, tile_v = padded_dim(head_dim), padded_dim(value_dim)
    fewest = max(16, next_power_of_2(group))
    num_rows = max(max_query_len, 1) * group
    if element_bytes == 4:
        return DotTiles(fewest, 16, tile_d, tile_v, num_warps=4, num_stages=2)
    is_wide = max(tile_d, tile_v) > 128
    is_hopper, is_blackwell = 90 <= capability < 100, 100 <= capability < 120
    is_widened = is_quantized and (is_hopper or (max(tile_d, tile_v) > 64 and not is_blackwell))
    most = 64 if is_wide or is_widened else 128
    tile_m = max(fewest, min(most, next_power_of_2(num_rows)))
    if is_hopper and not is_quantized and 64 < max(tile_d, tile_v) <= 128:
        is_large = cdiv(num_rows, _LARGE_ROWS) * num_runs >= _PROGRAMS_EACH * multiprocessors
        return _hopper_tiles_of_128(num_rows, fewest, tile_d, tile_v, is_large=is_large)
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
    is_tight = is_quantized or tile_m <= max(32, fewest)  # small tiles would spill to fit one program more
    return DotTiles(tile_m, tile_n, tile_d, tile_v, num_warps, 3, max_registers=255 if is_tight else None)


def fixed_prefill_tiles(
    head_dim: int, value_dim: int, group: int, element_bytes: int, capability: int, *, is_quantized: bool = False
) -> DotTiles:
    """The same whatever the runs are. A token alone does not fill them, and waits for memory."""
    most = max(1, _FIXED_ROWS // group)
    tiles = prefill_tiles(head_dim, value_dim, group, element_bytes, most, capability, is_quantized=is_quantized)
    return tiles._replace(max_registers=tiles.max_registers or 255)


def _hopper_tiles_of_128(num_rows: int, fewest: int, tile_d: int, tile_v: int, *, is_large: bool) -> DotTiles:
    """For heads of 128, as measured on an H100: large tiles are 1.1 to 1.2 times as fast where they leave programs for
    all multiprocessors, although a thread of them spills some bytes; of the small ones two fit a multiprocessor."""
    if is_large:
        return DotTiles(_LARGE_ROWS, 64, tile_d, tile_v, num_warps=16, num_stages=2)
    return DotTiles(max(fewest, min(64, next_power_of_2(num_rows))), 64, tile_d, tile_v, num_warps=4, num_stages=3)


def _hopper_prefill_tiles(tile_m: int, tile_d: int, tile_v: int, element_bytes: int, *, is_quantized: bool) -> DotTiles:
    """For all other heads, as measured on an H100: the best, or near it, of some ten shapes for each kind of heads that
    spill nothing.

    Eight bits want few stages, since they are widened in registers; heads of 64 gain half again from two stages
    instead of three, heads of 256 from four warps instead of eight.
    """
    is_wide = max(tile_d, tile_v) > 128
    if is_quantized or is_wide:
        tile_n = _tile_tokens(tile_d, tile_v, element_bytes, (16 << 10) if is_wide else (32 << 10))
        return DotTiles(tile_m, tile_n, tile_d, tile_v, 4, 2, 255 if is_quantized else None)
    tile_n = _tile_tokens(tile_d, tile_v, element_bytes, 32 << 10)
    num_warps, max_registers = (8 if tile_m >= 128 else 4), (255 if tile_m < 64 else None)
    return DotTiles(tile_m, tile_n, tile_d, tile_v, num_warps, 2, max_registers)


class LatentTiles(NamedTuple):
    """Tile of one program over latents: TILE_M rows, each a query and a head, by TILE_N tokens."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


def latent_tiles(num_rows: int, element_bytes: int, capability: int, *, is_quantized: bool = False) -> LatentTiles:
    """Of `num_rows` rows of a request, its queries times its heads; for latents of up to 512 numbers.

    A row keeps as many sums as a latent has numbers, which is what bounds the tile: 16 rows fit a warp's registers with
    the query beside them. Where tiles of queries lie in shared memory, 64 rows do, and a token is read a quarter as
    often. `compile_report` shows that none of these spill.
    """
    if element_bytes == 4:
        return LatentTiles(16, 16, 8 if capability >= 100 or is_quantized else 4, 2)
    if is_quantized:  # widened in registers, of which few are left
        return LatentTiles(32, 32, 8, 2) if num_rows >= 32 else LatentTiles(16, 16, 4, 2)
    if num_rows >= 64 and 90 <= capability < 120:
        return LatentTiles(64, 32, 8, 2)
    return LatentTiles(32, 32, 8, 2) if num_rows >= 32 else LatentTiles(16, 32, 4, 2)


def attention_constants(group: int, head_dim: int, value_dim: int, block_size: int, tiles: DotTiles) -> dict[str, int]:
    """The constants, by name, that both attention kernels take from shapes and tiles."""
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
    """Of the device; a CPU, where kernels are interpreted, counts as an H100, so that it splits as one does."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def compute_capability(device: torch.device) -> int:
    """Of the device, 90 for 9.0; a CPU, where kernels are interpreted, counts as that."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def has_little_shared(capability: int) -> bool:
    """Whether a program has at most 99 KiB of shared memory: GeForce and workstation cards, whose matrix units are
    those of 8.x even on 12.x."""
    return capability in (86, 89) or capability >= 120


def padded_dim(head_dim: int) -> int:
    """A head dim as `tl.dot` takes it."""
    return max(16, next_power_of_2(head_dim))


def _tile_tokens(head_dim: int, value_dim: int, element_bytes: int, max_bytes: int) -> int:
    """Tokens of a tile: 16 to 64, a power of two, so that its keys and values take at most `max_bytes`."""
    token_bytes = (padded_dim(head_dim) + padded_dim(value_dim)) * element_bytes
    fitting = next_power_of_2(max_bytes // token_bytes + 1) // 2
    return min(64, max(16, fitting))
