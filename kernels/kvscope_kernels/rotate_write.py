"""Operations before attention in one launch: norms of queries and keys, rotation, and the write to the cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from kvscope_kernels.checks import FLOAT_DTYPES, check_caches, require
from kvscope_kernels.kv_formats import Cache, as_kernel_input, kv_format, quantize_rows, scale_strides
from kvscope_kernels.kv_write import kv_write_torch
from kvscope_kernels.rms_norm import rms_norm_torch
from kvscope_kernels.triton_language import cdiv, jit_varying, next_power_of_2, require_triton, tl

_MAX_TILE_ELEMENTS = 1024  # per program


class HeadNorm(NamedTuple):
    """RMSNorm of each query and key head."""

    weight: Tensor
    """(num_heads + num_kv_heads, head_dim) float32, contiguous"""
    eps: Tensor
    """Scalar tensor, float32."""


class CosSin(NamedTuple):
    """Rotary position embedding of a step: x * cos + (x with its halves swapped) * signed_sin."""

    cos: Tensor
    """(num_tokens, 1, head_dim), with a contiguous last axis."""
    signed_sin: Tensor
    """Sine with the same shape, negated in the first half."""


class Rotation(NamedTuple):
    """Normalization and rotation of queries and keys before attention."""

    num_heads: int
    """Number of query heads, which come first in each token."""
    norm: HeadNorm | None
    cos_sin: CosSin | None


def rotate_write(
    heads: Tensor,
    rotation: Rotation,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Normalize and rotate queries and keys, as `rotation` requires, and scatter keys and values into the cache, in
    place.

    Computed in float32 and rounded to the dtype of `heads` once, before an 8-bit cache rounds again.

    Args:
        heads: (num_tokens, num_heads + 2 * num_kv_heads, head_dim), floating-point, with a contiguous last axis:
            queries, keys and values of each token, as from one fused linear layer.
        rotation: Norm and rotation to apply.
        k_cache: As for `kv_write`; keys and values must have equal dimensions.
        v_cache: As for `kv_write`.
        slot_mapping: As for `kv_write`.
        k_scale: As for `kv_write`.
        v_scale: As for `kv_write`.

    Returns:
        Queries (num_tokens, num_heads, head_dim), also of tokens whose slot is -1.

    Raises:
        ValueError: Unsupported arguments.

    Sources: Su et al., RoFormer, 2021; the slot mapping of vLLM's reshape_and_cache (arXiv 2309.06180).
    """
    cache = Cache(k_cache, v_cache, k_scale, v_scale)
    check_rotation(heads, rotation, cache, slot_mapping)
    require_triton()
    num_heads, norm, cos_sin = rotation
    num_tokens, _, head_dim = heads.shape
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
    if num_tokens == 0:
        return query
    cache_format = kv_format(k_cache)
    constants = rotate_constants(num_heads, k_cache.shape[2], head_dim, k_cache.shape[1])
    tile = constants["TILE_H"]
    _rotate_write_kernel[(num_tokens, cdiv(num_heads, tile) + cdiv(k_cache.shape[2], tile))](
        heads,
        None if norm is None else norm.weight,
        None if norm is None else norm.eps,
        None if cos_sin is None else cos_sin.cos,
        None if cos_sin is None else cos_sin.signed_sin,
        query,
        as_kernel_input(k_cache, cache_format),
        as_kernel_input(v_cache, cache_format),
        slot_mapping,
        k_scale,
        v_scale,
        *heads.stride()[:2],
        None if cos_sin is None else cos_sin.cos.stride(0),
        None if cos_sin is None else cos_sin.signed_sin.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *scale_strides(k_scale),
        **constants,
        KV_FORMAT=cache_format,
        num_warps=4,
    )
    return query


def rotate_constants(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> dict[str, int]:
    tile_d = next_power_of_2(head_dim)
    return {
        "BLOCK_SIZE": block_size,
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "TILE_H": min(next_power_of_2(num_kv_heads), max(1, _MAX_TILE_ELEMENTS // tile_d)),
        "TILE_D": tile_d,
    }


@jit_varying(pointers=("slot_mapping",))
def _rotate_write_kernel(
    heads: tl.tensor,
    norm_weight: tl.tensor,
    eps: tl.tensor,
    cos: tl.tensor,
    signed_sin: tl.tensor,
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slot_mapping: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    stride_t: tl.tensor,
    stride_h: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
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
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_D: tl.constexpr,
    KV_FORMAT: tl.constexpr,
) -> None:
    """Each program processes TILE_H query heads of one token. The last programs process TILE_H heads of keys
    and values.
    """
    token = tl.program_id(0).to(tl.int64)
    num_query_tiles: tl.constexpr = (NUM_HEADS + TILE_H - 1) // TILE_H
    part = tl.program_id(1)
    is_query = part < num_query_tiles
    first = tl.where(is_query, part, part - num_query_tiles) * TILE_H
    num_heads_of_kind = tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)
    head = first + tl.arange(0, TILE_H)
    row_head = tl.where(is_query, head, head + NUM_HEADS)
    dim = tl.arange(0, TILE_D)
    inside = (head < num_heads_of_kind)[:, None] & (dim < HEAD_DIM)[None, :]
    rows = heads + token * stride_t + row_head[:, None] * stride_h
    numbers = tl.load(rows + dim[None, :], mask=inside, other=0.0)
    result = numbers.to(tl.float32)
    factor = tl.full([TILE_H], 1.0, tl.float32)
    if norm_weight is not None:
        factor = tl.rsqrt(tl.sum(result * result, 1) / HEAD_DIM + tl.load(eps))
        weights = norm_weight + row_head[:, None] * HEAD_DIM
        result *= factor[:, None] * tl.load(weights + dim[None, :], mask=inside, other=0.0)
    if cos is not None:
        half: tl.constexpr = HEAD_DIM // 2
        swapped = tl.where(dim < half, dim + half, dim - half)
        partner = tl.load(rows + swapped[None, :], mask=inside, other=0.0).to(tl.float32)
        if norm_weight is not None:
            weights = norm_weight + row_head[:, None] * HEAD_DIM
            partner *= factor[:, None] * tl.load(weights + swapped[None, :], mask=inside, other=0.0)
        in_dim = dim < HEAD_DIM
        cosine = tl.load(cos + token * cos_stride + dim, mask=in_dim, other=0.0).to(tl.float32)
        sine = tl.load(signed_sin + token * sin_stride + dim, mask=in_dim, other=0.0).to(tl.float32)
        result = result * cosine[None, :] + partner * sine[None, :]
    rotated = result.to(query.dtype.element_ty)
    if is_query:
        tl.store(query + (token * NUM_HEADS + head[:, None]) * HEAD_DIM + dim[None, :], rotated, mask=inside)
    else:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            block = slot // BLOCK_SIZE
            offset = slot % BLOCK_SIZE
            new_value = tl.load(rows + NUM_KV_HEADS * stride_h + dim[None, :], mask=inside, other=0.0)
            k_slot = k_cache + block * k_stride_b + offset * k_stride_s + head[:, None] * k_stride_h
            v_slot = v_cache + block * v_stride_b + offset * v_stride_s + head[:, None] * v_stride_h
            if KV_FORMAT:
                k_data, k_factor = quantize_rows(tl.where(inside, rotated, 0.0), KV_FORMAT)
                v_data, v_factor = quantize_rows(new_value, KV_FORMAT)
                scale_offset = block * scale_stride_b + offset * scale_stride_s + head * scale_stride_h
                tl.store(k_scale + scale_offset, k_factor, mask=head < NUM_KV_HEADS)
                tl.store(v_scale + scale_offset, v_factor, mask=head < NUM_KV_HEADS)
                tl.store(k_slot + dim[None, :], k_data, mask=inside)
                tl.store(v_slot + dim[None, :], v_data, mask=inside)
            else:
                tl.store(k_slot + dim[None, :], rotated, mask=inside)
                tl.store(v_slot + dim[None, :], new_value, mask=inside)


def rotate_write_torch(
    heads: Tensor,
    rotation: Rotation,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Reference of `rotate_write`, and the implementation for CPUs without C."""
    query, key, value = rotate_torch(heads, rotation)
    kv_write_torch(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return query


def rotate_torch(heads: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values without writing to the cache: (T, Hq, D), (T, Hkv, D), (T, Hkv, D)."""
    num_heads, norm, cos_sin = rotation
    num_rotated = (heads.shape[1] + num_heads) // 2
    rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
    if norm is not None:
        rotated = rms_norm_torch(rotated, norm.weight, norm.eps, heads.dtype)
    if cos_sin is not None:
        rotated = torch.addcmul(rotated * cos_sin.cos, rotated.roll(rotated.shape[-1] // 2, -1), cos_sin.signed_sin)
    return rotated[:, :num_heads], rotated[:, num_heads:], value


def check_rotation(heads: Tensor, rotation: Rotation, cache: Cache, slot_mapping: Tensor) -> None:
    num_heads, norm, cos_sin = rotation
    if heads.dim() != 3 or heads.stride(2) != 1 or heads.dtype not in FLOAT_DTYPES:
        needed = "(tokens, num_heads + 2 * num_kv_heads, head_dim), floating, with contiguous head_dim"
        require(False, "heads", heads, needed)
    check_caches(cache, heads, "heads")
    num_tokens, count, head_dim = heads.shape
    num_kv_heads = cache.k_cache.shape[2]
    dims = {head_dim, cache.k_cache.shape[3], cache.v_cache.shape[3]}
    if count != num_heads + 2 * num_kv_heads or len(dims) > 1:
        needed = f"{num_heads} + 2 * {num_kv_heads} heads of {cache.k_cache.shape[3]}, as in the caches,"
        require(False, "heads", heads, needed)
    if norm is not None:
        shape = (num_heads + num_kv_heads, head_dim)
        if norm.weight.shape != shape or norm.weight.dtype != torch.float32 or not norm.weight.is_contiguous():
            require(False, "norm.weight", norm.weight, f"{shape} float32, contiguous,")
    for name, table in (
        () if cos_sin is None else (("cos_sin.cos", cos_sin.cos), ("cos_sin.signed_sin", cos_sin.signed_sin))
    ):
        if table.shape != (num_tokens, 1, head_dim) or table.stride(2) != 1 or head_dim % 2:
            require(False, name, table, f"({num_tokens}, 1, {head_dim}), contiguous, of an even size,")
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != heads.shape[:1]:
        require(False, "slot_mapping", slot_mapping, f"({num_tokens},) int64")
    if slot_mapping.stride(0) != 1 and len(slot_mapping) > 1:
        require(False, "slot_mapping", slot_mapping, "a contiguous axis")
