"""Writes a step's new keys and values to their slots in the paged cache."""

import torch
from torch import Tensor

from kvscope_kernels.checks import FLOAT_DTYPES, check_caches, require
from kvscope_kernels.kv_formats import (
    Cache,
    as_bytes,
    as_kernel_input,
    kv_format,
    quantize,
    quantize_rows,
    scale_strides,
)
from kvscope_kernels.triton_language import cdiv, jit_varying, next_power_of_2, require_triton, tl

_MAX_TILE_ELEMENTS = 2048  # per program, for keys and for values each


def kv_write(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Scatter the new tokens of one layer into the cache, in place.

    For each token t with slot = slot_mapping[t] >= 0:

        k_cache[slot // block_size, slot % block_size] = key[t], and v_cache likewise with value[t].

    Tokens with slot -1 are skipped. Slots must be distinct and inside the cache. All tensors have one dtype (float32,
    bfloat16, float16) and device, or caches are int8 or float8_e4m3fn, to which each head's vector is quantized with
    its scale (`kv_formats`). Rows aligned to 16 bytes are moved in 16-byte pieces.

    Args:
        key: (num_tokens, num_kv_heads, head_dim), any strides with a contiguous last axis.
        value: (num_tokens, num_kv_heads, value_dim), likewise.
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim), any strides with a contiguous last axis: a view of
            storage in HND (heads before slots) or NHD order.
        v_cache: (num_blocks, block_size, num_kv_heads, value_dim), likewise.
        slot_mapping: (num_tokens,) int64.
        k_scale: Output for 8-bit caches, (num_blocks, block_size, num_kv_heads) float32, any strides.
        v_scale: Like `k_scale`, with the same strides.

    Raises:
        ValueError: Unsupported arguments.

    Source: the slot mapping of vLLM's reshape_and_cache (arXiv 2309.06180).
    """
    _check(key, value, Cache(k_cache, v_cache, k_scale, v_scale), slot_mapping)
    require_triton()
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    cache_format = kv_format(k_cache)
    constants = write_constants(num_kv_heads, head_dim, value.shape[2], k_cache.shape[1])
    _kv_write_kernel[(num_tokens, cdiv(num_kv_heads, constants["TILE_H"]))](
        key,
        value,
        as_kernel_input(k_cache, cache_format),
        as_kernel_input(v_cache, cache_format),
        slot_mapping,
        k_scale,
        v_scale,
        *key.stride()[:2],
        *value.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *scale_strides(k_scale),
        **constants,
        KV_FORMAT=cache_format,
        num_warps=4,
    )


def write_constants(num_kv_heads: int, head_dim: int, value_dim: int, block_size: int) -> dict[str, int]:
    tile_d = next_power_of_2(max(head_dim, value_dim))
    return {
        "BLOCK_SIZE": block_size,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "TILE_H": min(next_power_of_2(num_kv_heads), max(1, _MAX_TILE_ELEMENTS // tile_d)),
        "TILE_D": tile_d,
    }


@jit_varying(pointers=("slot_mapping",))
def _kv_write_kernel(
    key: tl.tensor,
    value: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slot_mapping: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    key_stride_t: tl.tensor,
    key_stride_h: tl.tensor,
    value_stride_t: tl.tensor,
    value_stride_h: tl.tensor,
    k_stride_b: tl.tensor,
    k_stride_s: tl.tensor,
    k_stride_h: tl.tensor,
    v_stride_b: tl.tensor,
    v_stride_s: tl.tensor,
    v_stride_h: tl.tensor,
    scale_stride_b: tl.tensor,
    scale_stride_s: tl.tensor,
    scale_stride_h: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_D: tl.constexpr,
    KV_FORMAT: tl.constexpr,
) -> None:
    """Each program writes TILE_H heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    head = (tl.program_id(1) * TILE_H + tl.arange(0, TILE_H))[:, None]
    dim = tl.arange(0, TILE_D)[None, :]
    in_key = (head < NUM_KV_HEADS) & (dim < HEAD_DIM)
    in_value = (head < NUM_KV_HEADS) & (dim < VALUE_DIM)
    new_key = tl.load(key + token * key_stride_t + head * key_stride_h + dim, mask=in_key)
    new_value = tl.load(value + token * value_stride_t + head * value_stride_h + dim, mask=in_value)
    if KV_FORMAT:
        new_key, k_factor = quantize_rows(tl.where(in_key, new_key, 0.0), KV_FORMAT)
        new_value, v_factor = quantize_rows(tl.where(in_value, new_value, 0.0), KV_FORMAT)
        heads = tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)
        scale_offset = block * scale_stride_b + offset * scale_stride_s + heads * scale_stride_h
        tl.store(k_scale + scale_offset, k_factor, mask=heads < NUM_KV_HEADS)
        tl.store(v_scale + scale_offset, v_factor, mask=heads < NUM_KV_HEADS)
    k_slot = k_cache + block * k_stride_b + offset * k_stride_s
    v_slot = v_cache + block * v_stride_b + offset * v_stride_s
    tl.store(k_slot + head * k_stride_h + dim, new_key, mask=in_key)
    tl.store(v_slot + head * v_stride_h + dim, new_value, mask=in_value)


def kv_write_torch(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Reference of `kv_write`, and the implementation for CPUs: one scatter for keys and one for values."""
    _check(key, value, Cache(k_cache, v_cache, k_scale, v_scale), slot_mapping)
    is_stored = slot_mapping >= 0
    if not bool(is_stored.all()):
        key, value, slot_mapping = key[is_stored], value[is_stored], slot_mapping[is_stored]
    block_size = k_cache.shape[1]
    indices = (slot_mapping.div(block_size, rounding_mode="floor"), slot_mapping.remainder(block_size))
    for rows, cache, scales in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        if scales is not None:
            rows, scale = quantize(rows, cache.dtype)
            scales.index_put_(indices, scale)
        as_bytes(cache).index_put_(indices, as_bytes(rows))


def _check(key: Tensor, value: Tensor, cache: Cache, slot_mapping: Tensor) -> None:
    if key.dim() != 3 or key.stride(2) != 1 or key.dtype not in FLOAT_DTYPES:
        needed = "(num_tokens, num_kv_heads, head_dim), floating, with contiguous head_dim"
        require(False, "key", key, needed)
    if value.shape[:2] != key.shape[:2] or value.dim() != 3 or value.stride(2) != 1:
        require(False, "value", value, f"{tuple(key.shape[:2])} + (value_dim,) with contiguous value_dim")
    check_caches(cache, key, "key")
    k_cache, v_cache, _, _ = cache
    if value.dtype != key.dtype or value.shape[2] != v_cache.shape[3]:
        require(False, "value", value, f"the dtype of key and the value_dim of v_cache, {v_cache.shape[3]},")
    if key.shape[1:] != k_cache.shape[2:]:
        require(False, "key", key, f"the heads and head_dim of k_cache, {tuple(k_cache.shape[2:])},")
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != key.shape[:1]:
        require(False, "slot_mapping", slot_mapping, f"({key.shape[0]},) int64")
    if slot_mapping.stride(0) != 1 and len(slot_mapping) > 1:
        require(False, "slot_mapping", slot_mapping, "a contiguous axis")
