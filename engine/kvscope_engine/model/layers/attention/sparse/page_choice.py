"""Choice of the blocks that a decode attends to: those with most of the attention, estimated from bounds of their keys.

The method is Quest (arXiv 2406.10774) with another ranking: see `kvscope_kernels.attention_scores.block_scores`.

Owns how many blocks are read and their compact block tables. Every KV head of every request chooses separately; decode
attention sees each as a request with one KV head, over the same memory viewed as blocks of one head. All shapes follow
from host data, so that CUDA graphs can capture the choice.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch

from kvscope_engine.model.kv_cache.kv_storage import LayerKV
from kvscope_kernels import Ops

MIN_TOKENS: Final = 256
"""Minimum number of tokens read per request, rounded up to blocks; shorter requests are read in full."""
MIN_BLOCKS: Final = 3
_WHOLE: Final = 1 << 20


class Chosen(NamedTuple):
    """Blocks that the heads of a batch attend to, as arguments of decode attention."""

    columns: torch.Tensor
    """(batch, num_kv_heads, most) int64: columns of the requests' block tables, ascending; the last block comes last,
    and unused entries equal the width of the tables.
    """
    block_tables: torch.Tensor
    """(batch * num_kv_heads, most) int32: block numbers in the view `by_head`."""
    seq_lens: torch.Tensor
    """(batch * num_kv_heads,) int32: all blocks are full except the last."""
    max_seq_len: int


class PageChoice:
    """Chooses a `fraction` of each request's blocks, rounded up, always including its first and its last block."""

    def __init__(self, fraction: float, block_size: int, ops: Ops, bounds_tokens: float = 1.0) -> None:
        """`bounds_tokens`: number of tokens whose keys and values have as many bytes as the bounds of one block."""
        self._parts = math.floor(fraction * _WHOLE)
        self._block_size = block_size
        self._ops = ops
        self._bounds_tokens = bounds_tokens
        self.min_blocks = max(MIN_BLOCKS, -(-MIN_TOKENS // block_size))

    def num_attended(self, num_blocks: int) -> int:
        """Return the number of blocks read of `num_blocks`."""
        return min(num_blocks, max(self.min_blocks, -(-num_blocks * self._parts // _WHOLE)))

    def num_tokens_read(self, num_tokens: int) -> int:
        """Return what a decode of `num_tokens` reads, in tokens: the chosen blocks and the bounds of all blocks."""
        num_blocks = -(-num_tokens // self._block_size)
        num_attended = self.num_attended(num_blocks)
        if num_attended == num_blocks:
            return num_tokens
        skipped = (num_blocks - num_attended) * self._block_size
        return num_tokens - skipped + math.ceil(num_blocks * self._bounds_tokens)

    def choose(
        self,
        query: torch.Tensor,
        kv: LayerKV,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_seq_len: int,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> Chosen | None:
        """Choose blocks for queries (batch, Hq, D) of a layer with bounds; None if all blocks are to be read."""
        width = min(block_tables.shape[1], -(-max_seq_len // self._block_size))
        most = self.num_attended(width)
        if kv.bounds is None or most >= width:
            return None
        scores = self._ops.block_scores(
            query,
            kv.bounds,
            block_tables,
            seq_lens,
            block_size=self._block_size,
            scale=scale,
            softcap=softcap,
            max_seq_len=max_seq_len,
        )
        num_blocks = (seq_lens + (self._block_size - 1)) // self._block_size
        columns, num_chosen = self._best(scores, num_blocks[:, None, None], most)
        rows = block_tables[:, None, :width].expand(-1, scores.shape[1], -1)
        blocks = rows.gather(2, columns.clamp(max=width - 1))
        lengths = (num_chosen[:, 0, 0] - num_blocks) * self._block_size + seq_lens
        return Chosen(
            columns=columns,
            block_tables=_head_blocks(blocks, kv.k).flatten(0, 1),
            seq_lens=lengths.to(torch.int32)[:, None].expand(-1, scores.shape[1]).contiguous().view(-1),
            max_seq_len=most * self._block_size,
        )

    def _best(self, scores: torch.Tensor, num_blocks: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return columns (batch, heads, most), and how many of them each request uses (batch, 1, 1)."""
        width = scores.shape[2]
        column = torch.arange(width, device=scores.device)
        is_kept = (column == 0) | (column == num_blocks - 1)
        ranked = scores.masked_fill(is_kept, math.inf).topk(most, 2).indices
        wanted = (num_blocks.long() * self._parts + (_WHOLE - 1)) // _WHOLE
        num_chosen = torch.minimum(wanted.clamp(min=self.min_blocks), num_blocks)
        is_over = column[:most] >= num_chosen
        return ranked.masked_fill(is_over, width).sort(2).values, num_chosen


def heads_apart(kv: LayerKV) -> LayerKV:
    """Return the layer's KV cache as decode attention sees it over chosen blocks: each block has one head."""
    return LayerKV(*(None if each is None else by_head(each) for each in kv[:4]))  # type: ignore[arg-type]


def by_head(cache: torch.Tensor) -> torch.Tensor:
    """View (num_blocks, block_size, heads, ...) as (blocks of one head, block_size, 1, ...), without a copy.

    In both layouts of the storage, the heads of a block start whole multiples of the head stride apart, and the block
    stride is a multiple of it. Rows in between belong to other heads or overlap them; `_head_blocks` gives the valid
    ones.
    """
    num_blocks, block_size, heads = cache.shape[:3]
    block, slot, head = cache.stride()[:3]
    rows = (num_blocks - 1) * (block // head) + heads
    return cache.as_strided((rows, block_size, 1, *cache.shape[3:]), (head, slot, head, *cache.stride()[3:]))


def _head_blocks(blocks: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Convert block ids, shape (batch, heads, n), to row indices of the view that `by_head` returns."""
    block, _, head, _ = cache.stride()
    heads = torch.arange(cache.shape[2], dtype=torch.int32, device=blocks.device)
    return blocks * (block // head) + heads[:, None]
