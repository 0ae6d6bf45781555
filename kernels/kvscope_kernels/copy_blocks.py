"""Copying whole blocks inside the cache, for copy-on-write of shared prefixes."""

import math

import torch
from torch import Tensor

from kvscope_kernels.checks import require
from kvscope_kernels.triton_language import cdiv, jit, require_triton, tl

_TILE = 2048  # elements one program moves


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copy blocks source -> destination in every layer, in place, in one launch.

    For each layer l and pair i:  cache[l, pairs[i, 1]] = cache[l, pairs[i, 0]].
    Destinations must be distinct, and none may be a source of the same call: copies run in any order.

    cache  (num_layers, num_blocks, *block), any dtype; the last axes, one block's content, in any order of
           dense strides (each block is one contiguous run of memory), the first two with any strides.
           One layer's storage goes as `storage[None]`.
    pairs  (n, 2) int64, contiguous: source, destination

    Raises ValueError. Source: copy-on-write of PagedAttention, arXiv 2309.06180 section 4.4.
    """
    _check(cache, pairs)
    require_triton()
    num_elements = math.prod(cache.shape[2:])
    if len(pairs) == 0 or num_elements == 0:
        return
    grid = (len(pairs), cache.shape[0], cdiv(num_elements, _TILE))
    _copy_blocks_kernel[grid](cache, pairs, *cache.stride()[:2], num_elements, TILE=_TILE, num_warps=4)


@jit
def _copy_blocks_kernel(
    cache: tl.tensor,
    pairs: tl.tensor,
    stride_layer: tl.tensor,
    stride_block: tl.tensor,
    num_elements: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """One program: TILE elements of one pair in one layer."""
    pair = tl.program_id(0).to(tl.int64)
    layer = cache + tl.program_id(1).to(tl.int64) * stride_layer
    source = layer + tl.load(pairs + pair * 2) * stride_block
    destination = layer + tl.load(pairs + pair * 2 + 1) * stride_block
    element = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = element < num_elements
    tl.store(destination + element, tl.load(source + element, mask=inside), mask=inside)


def copy_blocks_torch(cache: Tensor, pairs: Tensor) -> None:
    """Reference of `copy_blocks`, and the CPU's own path."""
    _check(cache, pairs)
    source, destination = pairs.unbind(1)
    cache.index_copy_(1, destination, cache.index_select(1, source))


def _check(cache: Tensor, pairs: Tensor) -> None:
    require(cache.dim() >= 3, "cache", cache, "(num_layers, num_blocks, *block)")
    content = cache[0, 0] if cache.shape[0] and cache.shape[1] else cache.new_empty(0)
    dense = content.numel() == 0 or torch.ops.aten.is_non_overlapping_and_dense(content)
    require(dense, "cache", cache, "dense blocks, each one run of memory,")
    right = pairs.dim() == 2 and pairs.shape[1] == 2 and pairs.dtype == torch.int64 and pairs.is_contiguous()
    right = right and pairs.device == cache.device
    require(right, "pairs", pairs, f"(n, 2) int64, contiguous, on {cache.device}")
