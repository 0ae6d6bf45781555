"""Per-channel minimum and maximum of the keys of each block, updated after new keys are written."""

import math

import torch
from torch import Tensor

from kvscope_kernels.checks import FLOAT_DTYPES, check_scale, require
from kvscope_kernels.kv_formats import LARGEST, as_kernel_input, dequantize, kv_format, scale_strides, widen
from kvscope_kernels.triton_language import jit_varying, next_power_of_2, require_triton, tl

_MAX_TILE_ELEMENTS = 4096


def block_bounds(k_cache: Tensor, bounds: Tensor, slot_mapping: Tensor, k_scale: Tensor | None = None) -> None:
    """For each block written in this step, set the minimum and maximum of its keys so far, per channel, in place.

    With o the highest offset among the step's slots of block b:

        bounds[b, 0] = min over j <= o of k_cache[b, j],     bounds[b, 1] = max over j <= o of k_cache[b, j]

    The bounds are recomputed from the cache, so they are correct and tight whatever the block contained before, even
    after a block copy. 8-bit keys are dequantized first. No device data is read on the host.

    Args:
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim), any strides with a contiguous last axis, with the new
            keys.
        bounds: Output, (num_blocks, 2, num_kv_heads, head_dim), contiguous, float32, bfloat16 or float16; with the
            dtype of k_cache unless that is 8-bit.
        slot_mapping: (num_tokens,) int64; -1 is skipped. Slots of one block must be adjacent and in ascending order.
        k_scale: (num_blocks, block_size, num_kv_heads) float32, for an 8-bit k_cache.

    Raises:
        ValueError: Unsupported arguments.

    Source: Quest, arXiv 2406.10774.
    """
    _check(k_cache, bounds, slot_mapping, k_scale)
    require_triton()
    num_tokens = len(slot_mapping)
    if num_tokens == 0:
        return
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    cache_format = kv_format(k_cache)
    _block_bounds_kernel[(num_tokens, num_kv_heads)](
        as_kernel_input(k_cache, cache_format),
        bounds,
        slot_mapping,
        k_scale,
        num_tokens,
        *k_cache.stride()[:3],
        *scale_strides(k_scale),
        NUM_KV_HEADS=num_kv_heads,
        **bounds_constants(head_dim, block_size),
        KV_FORMAT=cache_format,
        num_warps=4,
    )


def bounds_constants(head_dim: int, block_size: int) -> dict[str, int]:
    tile_d = next_power_of_2(head_dim)
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "TILE_S": min(next_power_of_2(block_size), max(1, _MAX_TILE_ELEMENTS // tile_d)),
        "TILE_D": tile_d,
    }


@jit_varying(numbers=("num_tokens",), pointers=("slot_mapping",))
def _block_bounds_kernel(
    k_cache: tl.tensor,
    bounds: tl.tensor,
    slot_mapping: tl.tensor,
    k_scale: tl.tensor,
    num_tokens: tl.tensor,
    k_stride_b: tl.tensor,
    k_stride_s: tl.tensor,
    k_stride_h: tl.tensor,
    scale_stride_b: tl.tensor,
    scale_stride_s: tl.tensor,
    scale_stride_h: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_D: tl.constexpr,
    KV_FORMAT: tl.constexpr,
) -> None:
    """Each program processes one token and KV head.

    It updates the token's block, unless a later token of the step is in the same block.
    """
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    following = tl.load(slot_mapping + token + 1, mask=token + 1 < num_tokens, other=-1)
    if (following == slot + 1) & (offset != BLOCK_SIZE - 1):
        return
    dim = tl.arange(0, TILE_D)
    in_dim = dim < HEAD_DIM
    low = tl.full([TILE_D], float("inf"), tl.float32)
    high = tl.full([TILE_D], float("-inf"), tl.float32)
    rows = k_cache + block * k_stride_b + kv_head * k_stride_h
    for start in range(0, BLOCK_SIZE, TILE_S):
        slot_index = start + tl.arange(0, TILE_S)
        inside = (slot_index <= offset)[:, None] & in_dim[None, :]
        key = tl.load(rows + slot_index[:, None] * k_stride_s + dim[None, :], mask=inside, other=0.0)
        if KV_FORMAT:
            scale_offset = block * scale_stride_b + slot_index * scale_stride_s + kv_head * scale_stride_h
            key_scale = tl.load(k_scale + scale_offset, mask=slot_index <= offset, other=0.0)
            key = widen(key, tl.float32, KV_FORMAT) * key_scale[:, None]
        key = key.to(tl.float32)
        low = tl.minimum(low, tl.min(tl.where(inside, key, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(inside, key, float("-inf")), 0))
    bounds_of_block = bounds + (block * (2 * NUM_KV_HEADS) + kv_head) * HEAD_DIM + dim
    tl.store(bounds_of_block, low.to(bounds.dtype.element_ty), mask=in_dim)
    tl.store(bounds_of_block + NUM_KV_HEADS * HEAD_DIM, high.to(bounds.dtype.element_ty), mask=in_dim)


def block_bounds_torch(k_cache: Tensor, bounds: Tensor, slot_mapping: Tensor, k_scale: Tensor | None = None) -> None:
    """Reference of `block_bounds`, and the implementation for CPUs."""
    _check(k_cache, bounds, slot_mapping, k_scale)
    block_size = k_cache.shape[1]
    is_last = slot_mapping >= 0
    is_continued = (slot_mapping[1:] == slot_mapping[:-1] + 1) & (slot_mapping[1:] % block_size != 0)
    is_last[:-1] &= ~is_continued
    ends = slot_mapping[is_last]
    blocks, newest = ends // block_size, ends % block_size
    keys = k_cache.index_select(0, blocks)
    if k_scale is not None:
        keys = dequantize(keys, k_scale.index_select(0, blocks), bounds.dtype)
    outside = torch.arange(block_size, device=k_cache.device) > newest[:, None]
    for side, fill, extreme in ((0, math.inf, torch.amin), (1, -math.inf, torch.amax)):
        bounds[:, side].index_copy_(0, blocks, extreme(keys.masked_fill(outside[..., None, None], fill), 1))


def _check(k_cache: Tensor, bounds: Tensor, slot_mapping: Tensor, k_scale: Tensor | None) -> None:
    if k_cache.dim() != 4 or k_cache.stride(3) != 1 or k_cache.dtype not in (*FLOAT_DTYPES, *LARGEST):
        needed = "(num_blocks, block_size, num_kv_heads, head_dim), floating or of 8 bits, with contiguous head_dim"
        require(False, "k_cache", k_cache, needed)
    if k_cache.dtype not in LARGEST:
        require(k_scale is None, "k_cache", k_cache, "int8 or float8_e4m3fn, or no k_scale,")
        check_bounds(bounds, k_cache.shape[0], k_cache)
    else:
        check_scale("k_scale", k_scale, k_cache)
        if bounds.dtype not in FLOAT_DTYPES or bounds.device != k_cache.device:
            require(False, "bounds", bounds, "floating, on the device of k_cache,")
        check_bounds(bounds, k_cache.shape[0], bounds)
    if tuple(bounds.shape[2:]) != tuple(k_cache.shape[2:]):
        require(False, "bounds", bounds, f"the heads and head_dim of k_cache, {tuple(k_cache.shape[2:])},")
    if slot_mapping.dim() != 1 or slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        require(False, "slot_mapping", slot_mapping, "(num_tokens,) int64, contiguous,")


def check_bounds(bounds: Tensor, num_blocks: int, like: Tensor) -> None:
    """Raise ValueError unless bounds are (num_blocks, 2, num_kv_heads, head_dim) of the dtype and device of `like`."""
    accepted = bounds.dim() == 4 and tuple(bounds.shape[:2]) == (num_blocks, 2) and bounds.is_contiguous()
    if not accepted or bounds.dtype != like.dtype or bounds.device != like.device:
        dtype = str(like.dtype).removeprefix("torch.")
        require(False, "bounds", bounds, f"({num_blocks}, 2, num_kv_heads, head_dim) {dtype}, contiguous,")
