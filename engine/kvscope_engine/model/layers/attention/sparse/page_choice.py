"""Which blocks a decode attends to: those on which most of its attention falls, as far as bounds of their keys tell
(Quest, arXiv 2406.10774, with another ranking: see `kvscope_kernels.attention_scores.block_scores`).

Owns how many are taken and the compact tables of those that are. Every KV head of every request chooses for itself;
for decode attention each is a request of one KV head, over the same bytes seen as blocks of one head. All shapes
follow from what the host knows, so that a CUDA graph holds them.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch

from kvscope_engine.model.kv_cache.kv_storage import LayerKV
from kvscope_kernels import Ops

MIN_TOKENS: Final = 256
"""Of each request, rounded up to blocks: what is shorter is attended to in full."""
MIN_BLOCKS: Final = 3
_WHOLE: Final = 1 << 20


class Chosen(NamedTuple):
    """The blocks that the heads of a batch attend to, as decode attention takes them."""

    columns: torch.Tensor
    """(batch, num_kv_heads, most) int64: places in the requests' tables, ascending, the last block last; behind these
    the width of the tables."""
    block_tables: torch.Tensor
    """(batch * num_kv_heads, most) int32, blocks of `by_head`."""
    seq_lens: torch.Tensor
    """(batch * num_kv_heads,) int32: full blocks but for the last."""
    max_seq_len: int


class PageChoice:
    """Takes a `fraction` of each request's blocks, rounded up, its first and its last among them."""

    def __init__(self, fraction: float, block_size: int, ops: Ops, bounds_tokens: float = 1.0) -> None:
        """`bounds_tokens`: of as many tokens the keys and values take the bytes of a block's bounds."""
        self._parts = math.floor(fraction * _WHOLE)
        self._block_size = block_size
        self._ops = ops
        self._bounds_tokens = bounds_tokens
        self.min_blocks = max(MIN_BLOCKS, -(-MIN_TOKENS // block_size))

    def num_attended(self, num_blocks: int) -> int:
        """Of so many."""
        return min(num_blocks, max(self.min_blocks, -(-num_blocks * self._parts // _WHOLE)))

    def num_tokens_read(self, num_tokens: int) -> int:
        """Of a request of so many: the tokens of the blocks that it attends to, and the bounds of all, as tokens."""
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
        """For queries (batch, Hq, D) of a layer that has bounds; None where all blocks are to be attended to."""
        width = min(block_tables.shape[1], -(-max_seq_len // self._block_size))
        most = self.num_attended(width)
        if kv.bounds is None or most >= width:
            return None
        scores = self._ops.block_scores(
            *(query, kv.bounds, block_tables, seq_lens),
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
        """(batch, heads, most) columns, and how many of them each request (batch, 1, 1) takes."""
        width = scores.shape[2]
        column = torch.arange(width, device=scores.device)
        is_kept = (column == 0) | (column == num_blocks - 1)
        ranked = scores.masked_fill(is_kept, math.inf).topk(most, 2).indices
        wanted = (num_blocks.long() * self._parts + (_WHOLE - 1)) // _WHOLE
        num_chosen = torch.minimum(wanted.clamp(min=self.min_blocks), num_blocks)
        is_over = column[:most] >= num_chosen
        return ranked.masked_fill(is_over, width).sort(2).values, num_chosen


def heads_apart(kv: LayerKV) -> LayerKV:
    """A layer as decode attention sees it over chosen blocks: each of them of one head."""
    return LayerKV(*(None if each is None else by_head(each) for each in kv[:4]))  # type: ignore[arg-type]


def by_head(cache: torch.Tensor) -> torch.Tensor:
    """(num_blocks, block_size, heads, ...) -> the same bytes as (blocks of one head, block_size, 1, ...).

    In both of the storage's orders the heads of a block begin a whole number of head strides behind each other, and
    blocks a multiple of that. Rows in between are other heads' or overlap them: `_head_blocks` names those to read.
    """
    num_blocks, block_size, heads = cache.shape[:3]
    block, slot, head = cache.stride()[:3]
    rows = (num_blocks - 1) * (block // head) + heads
    return cache.as_strided((rows, block_size, 1, *cache.shape[3:]), (head, slot, head, *cache.stride()[3:]))


def _head_blocks(blocks: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Of blocks (batch, heads, n), the rows of `by_head`."""
    block, _, head, _ = cache.stride()
    heads = torch.arange(cache.shape[2], dtype=torch.int32, device=blocks.device)
    return blocks * (block // head) + heads[:, None]
