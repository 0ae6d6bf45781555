"""Decode attention on a CPU that reads blocks where they lie, from attention.c."""

import ctypes

import torch
from torch import Tensor

from kvscope_kernels.decode.plan import DecodePlans
from kvscope_kernels.kv_formats import Cache
from kvscope_kernels.native.library import DecodeParts, library
from kvscope_kernels.paged_decode_attention import check_decode, paged_decode_attention_torch
from kvscope_kernels.relevance.block_attention import check_shares

_DTYPES = (torch.bfloat16, torch.float32)


def paged_decode_attention_native(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    max_seq_len: int | None = None,
    out: Tensor | None = None,
    plans: DecodePlans | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """`paged_decode_attention` for bfloat16 and float32; the rest (caches of 8 bits, float16, heads
    that 16 does not divide) goes the reference's way.

    `shares` take what `block_attention` adds, in the same pass. Sums and weights are float32, so it is nearer to the
    exact result than torch's own bfloat16 product.
    """
    found = library()
    is_ours = query.dtype in _DTYPES and k_cache.dtype == query.dtype and query.shape[-1] % 16 == 0
    if found is None or not is_ours or v_cache.shape[3] != query.shape[-1]:
        return paged_decode_attention_torch(
            *(query, k_cache, v_cache, block_tables, seq_lens),
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            shares=shares,
        )
    if shares is not None:
        check_shares(query, shares, block_tables.shape[1])
    check_decode(
        query, Cache(k_cache, v_cache, k_scale, v_scale), block_tables, seq_lens, sliding_window, softcap, sinks, out
    )
    batch, heads, head_dim = query.shape
    block_size, kv_heads = v_cache.shape[1:3]
    out = query.new_empty(batch, heads, head_dim) if out is None else out
    sinks = None if sinks is None else sinks.float()
    parts = DecodeParts(
        *(query.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_tables.data_ptr(), seq_lens.data_ptr()),
        *(None if sinks is None else sinks.data_ptr(), out.data_ptr()),
        *(*query.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3]),
        *(block_tables.stride(0), *out.stride()[:2]),
        *(batch, heads, kv_heads, head_dim, block_size, sliding_window or 0),
        *(scale, softcap or 0.0, query.dtype == torch.float32, torch.get_num_threads()),
        *((None, 0) if shares is None else (shares.data_ptr(), shares.stride(0))),
    )
    if found.kvscope_decode(ctypes.addressof(parts)):
        raise MemoryError("no memory for attention's sums")
    return out
