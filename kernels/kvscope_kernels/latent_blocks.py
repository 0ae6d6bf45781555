"""Dequantization of 8-bit latents, for the torch references and for operations that need the query's dtype.

A token's latent and its rotary key have separate scales, since they differ in magnitude: `v_scale` is the scale of the
latent, which is the value, and `k_scale` is the scale of the rotary key, which follows the latent in the key.
"""

import torch
from torch import Tensor

from kvscope_kernels.attention_args import AttentionArgs
from kvscope_kernels.kv_formats import as_bytes, dequantize
from kvscope_kernels.triton_language import cdiv

_TOKENS_PER_PART = 4096
"""Number of tokens dequantized at a time. The conversion via float32 takes five times the memory of the result."""


def are_latents(args: AttentionArgs) -> bool:
    """Whether the values are a prefix of the keys, as in a cache of MLA latents."""
    return args.v_cache.data_ptr() == args.k_cache.data_ptr()


def latent_blocks(args: AttentionArgs, blocks: Tensor) -> Tensor:
    """Return `blocks` (n,) of the cache in the query's dtype, (n, block_size, 1, head_dim). Unwritten slots
    have arbitrary contents.
    """
    k_cache, k_scale, v_scale, latent_dim = args.k_cache, args.k_scale, args.v_scale, args.v_cache.shape[3]
    if k_scale is None or v_scale is None:
        return k_cache.index_select(0, blocks)
    out = args.query.new_empty(len(blocks), *k_cache.shape[1:])
    step = max(1, _TOKENS_PER_PART // k_cache.shape[1])
    for start in range(0, len(blocks), step):
        part, out_part = blocks[start : start + step], out[start : start + step]
        quantized = as_bytes(k_cache).index_select(0, part).view(k_cache.dtype)
        out_part[..., :latent_dim] = dequantize(quantized[..., :latent_dim], v_scale.index_select(0, part), out.dtype)
        out_part[..., latent_dim:] = dequantize(quantized[..., latent_dim:], k_scale.index_select(0, part), out.dtype)
    return out


def plain_latents(args: AttentionArgs) -> AttentionArgs:
    """Return `args` with an 8-bit cache of latents replaced by a temporary cache in the query's dtype, without scales.

    The temporary cache has only the blocks of the requests in `args`. Arguments with any other cache are returned
    unchanged.
    """
    if args.k_scale is None or not are_latents(args):
        return args
    num_blocks, block_size = args.k_cache.shape[:2]
    width = args.block_tables.shape[1]
    if args.max_seq_len is not None:
        width = min(width, cdiv(args.max_seq_len, block_size))
    tables = args.block_tables[:, :width]
    stored = latent_blocks(args, tables.reshape(-1).clamp(0, num_blocks - 1))
    own_tables = torch.arange(tables.numel(), dtype=torch.int32, device=stored.device).view(tables.shape)
    values = stored[..., : args.v_cache.shape[3]]
    return args._replace(k_cache=stored, v_cache=values, block_tables=own_tables, k_scale=None, v_scale=None)
