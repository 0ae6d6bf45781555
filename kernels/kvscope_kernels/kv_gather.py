"""Gathers many requests' blocks into dense keys and values, for the torch references.

Guarantees that nothing outside a request's tokens affects results: slots past its length, freed blocks and stale table
entries may contain anything, NaN included.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvscope_kernels.host_lengths import Lengths
from kvscope_kernels.kv_formats import Cache, dequantize


class GatheredKV(NamedTuple):
    """Gathered keys (n, num_tokens, num_kv_heads, head_dim), values likewise, and their positions."""

    keys: Tensor
    values: Tensor
    base: Lengths
    """(n,) position of the first gathered token within its request."""
    padding: Tensor | None
    """(n, num_tokens) bool: whether a token is outside [first, end) and zeroed; None if no token is."""


def gather_kv(cache: Cache, block_tables: Tensor, first: Lengths, end: Lengths, dtype: torch.dtype) -> GatheredKV:
    """Gather the keys and values of tokens [first[i], end[i]) of each of n requests, at least one token in total.

    The result for a request starts with the first token of the block that contains token first[i]. `dtype`: dtype of
    the result, which must be that of the cache unless the cache has 8 bits.
    """
    if len(end) == 1 or bool(((first == first[0]) & (end == end[0])).all()):
        return _gather_equal(cache, block_tables, int(first[0]), int(end[0]), dtype)
    block_size = cache.k_cache.shape[1]
    first_block = first // block_size
    width = int((-(-end // block_size) - first_block).max())
    blocks = _table_columns(block_tables, first_block, width).clamp(0, cache.k_cache.shape[0] - 1)
    keys, values = _dense_kv(cache, blocks, dtype)
    base = first_block * block_size
    padding = _zero_outside(keys, values, first - base, end - base)
    return GatheredKV(keys, values, base, padding)


def gather_keys(cache: Cache, block_tables: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather the keys of all blocks in the tables (n, width): (n, width * block_size, num_kv_heads, head_dim).

    Invalid table entries give arbitrary blocks, and unwritten slots may be NaN: the caller must mask their scores.
    """
    blocks = block_tables.clamp(0, cache.k_cache.shape[0] - 1)
    keys = _dense(cache.k_cache, blocks)
    return keys if cache.k_scale is None else dequantize(keys, _dense(cache.k_scale, blocks), dtype)


def _gather_equal(cache: Cache, block_tables: Tensor, first: int, end: int, dtype: torch.dtype) -> GatheredKV:
    """Gather the same positions of every request. Without padding, nothing has to be zeroed or masked."""
    block_size = cache.k_cache.shape[1]
    first_block = first // block_size
    blocks = block_tables[:, first_block : -(-end // block_size)]
    inside = slice(first - first_block * block_size, end - first_block * block_size)
    base = np.full(len(blocks), first)
    keys, values = _dense_kv(cache, blocks, dtype)
    return GatheredKV(keys[:, inside], values[:, inside], base, None)


def _table_columns(block_tables: Tensor, first_block: Lengths, width: int) -> Tensor:
    """Return each request's table entries from `first_block` on, (n, width). Past the table's end, its last
    column is repeated.
    """
    if not first_block.any():
        return block_tables[:, :width]
    columns = first_block[:, None] + np.arange(width)
    return block_tables.gather(1, torch.from_numpy(columns).clamp_(max=block_tables.shape[1] - 1))


def _dense_kv(cache: Cache, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values of whole blocks, dequantized: (n, width * block_size, num_kv_heads, head_dim)."""
    keys, values = _dense(cache.k_cache, blocks), _dense(cache.v_cache, blocks)
    if cache.k_scale is None or cache.v_scale is None:
        return keys, values
    k_scale, v_scale = _dense(cache.k_scale, blocks), _dense(cache.v_scale, blocks)
    return dequantize(keys, k_scale, dtype), dequantize(values, v_scale, dtype)


def _dense(cache: Tensor, blocks: Tensor) -> Tensor:
    """Return the cache entries of `blocks`, (n, width * block_size, num_kv_heads, ...). Each block is
    contiguous and copied as a whole.
    """
    n, width = blocks.shape
    return cache.index_select(0, blocks.reshape(-1)).view(n, width * cache.shape[1], *cache.shape[2:])


def _zero_outside(keys: Tensor, values: Tensor, start: Lengths, stop: Lengths) -> Tensor:
    """Zero the tokens outside [start, stop) of each request, in place, and return their mask."""
    token = np.arange(keys.shape[1])
    padding = (token < start[:, None]) | (token >= stop[:, None])
    outside = torch.from_numpy(np.flatnonzero(padding))
    for dense in (keys, values):
        dense.view(-1, dense.shape[2] * dense.shape[3]).index_fill_(0, outside, 0)
    return torch.from_numpy(padding)
