"""Decode attention on a CPU, from attention.c. Reads KV blocks in place."""

import ctypes

import torch
from torch import Tensor

from kvscope_kernels.attention_args import AttentionArgs
from kvscope_kernels.attention_scores.block_attention import check_shares
from kvscope_kernels.cpu.library import DecodeStruct, library
from kvscope_kernels.cpu.operand_types import cache_refusal
from kvscope_kernels.decode.plan import DecodePlans
from kvscope_kernels.paged_decode_attention import check_decode, paged_decode_attention_torch

_HEAD_STEP = 16


def decode_refusal(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, value_dim: int) -> str:
    """Return why `paged_decode_attention_native` uses the torch reference for heads of these dtypes and sizes,
    or "" if it does not.
    """
    if refusal := cache_refusal(dtype, cache_dtype):
        return refusal
    if head_dim % _HEAD_STEP or value_dim % _HEAD_STEP:
        return f"C needs heads whose sizes are multiples of {_HEAD_STEP}, not {head_dim} and {value_dim}"
    return ""


def paged_decode_attention_native(
    args: AttentionArgs, plans: DecodePlans | None = None, shares: Tensor | None = None
) -> Tensor:
    """Run `paged_decode_attention` in C for bfloat16 and float32; otherwise run the torch reference.

    The reference is used for 8-bit caches, float16, and head dims that are not multiples of 16. The attention shares of
    `block_attention_torch` are computed in the same pass. Sums and weights are float32, so the result is closer to the
    exact one than with torch's bfloat16 matmul.
    """
    native = library()
    query, k_cache, v_cache, block_tables, seq_lens = args[:5]
    if native is None or decode_refusal(query.dtype, k_cache.dtype, query.shape[-1], v_cache.shape[3]):
        return paged_decode_attention_torch(args, shares=shares)
    if shares is not None:
        check_shares(query, shares, block_tables.shape[1])
    check_decode(args)
    batch, heads, head_dim = query.shape
    block_size, kv_heads, value_dim = v_cache.shape[1:]
    out = args.out_or_new()
    sinks = None if args.sinks is None else args.sinks.float()
    arguments = DecodeStruct(
        query.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_tables.data_ptr(),
        seq_lens.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        *query.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        *out.stride()[:2],
        batch,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        block_size,
        args.sliding_window or 0,
        args.scale,
        args.softcap or 0.0,
        query.dtype == torch.float32,
        args.is_chunked,
        torch.get_num_threads(),
        *((None, 0) if shares is None else (shares.data_ptr(), shares.stride(0))),
    )
    if native.kvscope_decode(ctypes.addressof(arguments)):
        raise MemoryError("no memory for attention's sums")
    return out
