"""Prefill attention on a CPU, from prefill.c. Reads KV blocks in place."""

import ctypes

import torch
from torch import Tensor

from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.cpu.library import PrefillStruct, library
from kvscope_kernels.cpu.operand_types import cache_refusal
from kvscope_kernels.paged_prefill_attention import check_prefill, paged_prefill_attention_torch


def prefill_refusal(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> str:
    """Return why `paged_prefill_attention_native` uses the torch reference for heads of these dtypes and sizes,
    or "" if it does not.
    """
    if refusal := cache_refusal(dtype, cache_dtype):
        return refusal
    return f"C needs heads of an even size, not {head_dim}" if head_dim % 2 else ""


def paged_prefill_attention_native(args: AttentionArgs, runs: QueryRuns) -> Tensor:
    """Run `paged_prefill_attention` in C for bfloat16 and float32; otherwise run the torch reference.

    The reference is used for 8-bit caches, float16, and an odd head_dim. Sums and softmax are float32. If the CPU
    multiplies pairs of bfloat16, weights are rounded to bfloat16, as in torch. A token's result does not depend on
    other requests or on how its request was split into chunks.
    """
    native = library()
    query, k_cache, v_cache, block_tables, seq_lens = args[:5]
    if native is None or prefill_refusal(query.dtype, k_cache.dtype, query.shape[-1]):
        return paged_prefill_attention_torch(args, runs)
    check_prefill(args, runs)
    _, heads, head_dim = query.shape
    block_size, kv_heads, value_dim = v_cache.shape[1:]
    out = args.out_or_new()
    query_start = runs.start.contiguous()
    sinks = None if args.sinks is None else args.sinks.float()
    arguments = PrefillStruct(
        query.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_tables.data_ptr(),
        query_start.data_ptr(),
        seq_lens.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        *query.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        *out.stride()[:2],
        len(seq_lens),
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
    )
    if native.kvscope_prefill(ctypes.addressof(arguments)):
        raise MemoryError("no memory for attention's sums")
    return out
