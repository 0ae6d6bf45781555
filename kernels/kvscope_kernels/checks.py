"""Argument checks for the operations. They raise ValueError with the tensor's name, its shape, and the requirement."""

import torch
from torch import Tensor

from kvscope_kernels.attention_args import AttentionArgs
from kvscope_kernels.kv_formats import LARGEST, Cache

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def require(is_accepted: bool, name: str, value: object, requirement: str) -> None:
    if not is_accepted:
        raise ValueError(f"{name} is {_describe(value)}: {requirement} is needed")


def check_caches(cache: Cache, like: Tensor, name: str) -> None:
    """Check that caches are (num_blocks, block_size, num_kv_heads, head_dim) on the device of `like`, and 8-bit
    or of its dtype.
    """
    k_cache, v_cache, _, _ = cache
    dtype = k_cache.dtype if k_cache.dtype in LARGEST else like.dtype
    for cache_name, part in (("k_cache", k_cache), ("v_cache", v_cache)):
        if part.dim() != 4 or part.stride(3) != 1:
            needed = "(num_blocks, block_size, num_kv_heads, head_dim) with contiguous head_dim"
            require(False, cache_name, part, needed)
        if part.dtype != dtype or part.device != like.device:
            require(False, cache_name, part, f"the dtype and device of {name} ({_describe(like)})")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        require(False, "v_cache", v_cache, f"the blocks and heads of k_cache {tuple(k_cache.shape)}")
    _check_scales(k_cache, cache.k_scale, cache.v_scale)


def _check_scales(k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Check that an 8-bit cache has a scale per token and KV head, and other caches have none."""
    if k_cache.dtype not in LARGEST:
        if k_scale is not None or v_scale is not None:
            require(False, "k_cache", k_cache, "int8 or float8_e4m3fn, or no k_scale and v_scale,")
        return
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_scale(name, scale, k_cache)
    if k_scale is not None and v_scale is not None and v_scale.stride() != k_scale.stride():
        require(False, "v_scale", v_scale, "the strides of k_scale")


def check_scale(name: str, scale: Tensor | None, cache: Tensor) -> None:
    """Check that the 8-bit `cache` has a scale per token and KV head."""
    if scale is None or scale.shape != cache.shape[:3] or scale.dtype != torch.float32:
        require(False, name, scale, f"{tuple(cache.shape[:3])} float32, for a cache of 8 bits,")
    elif scale.device != cache.device:
        require(False, name, scale, "the device of the cache")


def check_attention(args: AttentionArgs) -> None:
    """Check the arguments that decode and prefill have in common; query is (rows, num_heads, head_dim)."""
    query, k_cache, v_cache, block_tables, seq_lens = args[:5]
    sliding_window, softcap, sinks, out = args.sliding_window, args.softcap, args.sinks, args.out
    if query.dim() != 3 or query.stride(2) != 1 or query.dtype not in FLOAT_DTYPES:
        require(False, "query", query, "(tokens, num_heads, head_dim), floating, with contiguous head_dim")
    check_caches(args.cache, query, "query")
    num_heads, num_kv_heads = query.shape[1], k_cache.shape[2]
    if num_heads % num_kv_heads or query.shape[2] != k_cache.shape[3]:
        needed = f"a multiple of {num_kv_heads} heads of {k_cache.shape[3]}, as in k_cache,"
        require(False, "query", query, needed)
    if seq_lens.dim() != 1 or seq_lens.dtype != torch.int32 or seq_lens.stride(0) != 1:
        require(False, "seq_lens", seq_lens, "(requests,) int32, contiguous")
    if block_tables.dim() != 2 or block_tables.dtype != torch.int32 or block_tables.shape[0] != len(seq_lens):
        require(False, "block_tables", block_tables, f"({len(seq_lens)}, max_blocks) int32")
    if block_tables.stride(1) != 1 and block_tables.shape[1] > 1:
        require(False, "block_tables", block_tables, "a contiguous last axis")
    if sliding_window is not None and sliding_window < 1:
        require(False, "sliding_window", sliding_window, "at least 1, or None,")
    if args.is_chunked and sliding_window is None:
        require(False, "sliding_window", sliding_window, "the length of a chunk, with is_chunked,")
    if softcap is not None and not softcap > 0:
        require(False, "softcap", softcap, "above 0, or None,")
    if sinks is not None and (sinks.shape != (num_heads,) or not sinks.is_contiguous()):
        require(False, "sinks", sinks, f"({num_heads},), contiguous,")
    if out is not None and not _is_valid_out(out, query, v_cache):
        needed = f"{(*query.shape[:2], v_cache.shape[3])} of the dtype of query, with contiguous last axis,"
        require(False, "out", out, needed)


def _is_valid_out(out: Tensor, query: Tensor, v_cache: Tensor) -> bool:
    shape = (*query.shape[:2], v_cache.shape[3])
    return tuple(out.shape) == shape and out.dtype == query.dtype and out.stride(2) == 1


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{tuple(value.shape)} {dtype} on {value.device} with strides {value.stride()}"
