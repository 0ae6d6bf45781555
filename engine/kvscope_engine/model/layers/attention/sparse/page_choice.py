"""Chooses the blocks to which a decode attends: those with most of the attention, estimated from bounds of their keys.

The method is Quest (arXiv 2406.10774) with another ranking: see `kvscope_kernels.attention_scores.block_scores`.

Decides how many blocks are read, and builds their compact block tables. Every KV head of every request chooses
separately. Decode attention treats each as a request with one KV head, over the same memory viewed as blocks of one
head. All shapes follow from host data, so that CUDA graphs can capture the choice.
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
_UNITS_PER_WHOLE: Final = 1 << 20


class Chosen(NamedTuple):
    """Blocks to which the heads of a batch attend, as arguments of decode attention."""

    columns: torch.Tensor
    """Shape (batch, num_kv_heads, max_chosen), int64: columns of the requests' block tables, ascending, so that a
    request's last block comes last.

    Unused entries equal the width of the tables.
    """
    block_tables: torch.Tensor
    """Shape (batch * num_kv_heads, max_chosen), int32: block numbers in the view that `by_head` returns."""
    seq_lens: torch.Tensor
    """Shape (batch * num_kv_heads,), int32: number of tokens in the chosen blocks. All chosen blocks are full
    except the last.
    """
    max_seq_len: int


class PageChoice:
    """Chooses a `fraction` of each request's blocks, rounded up, always including the first and the last block."""

    def __init__(self, fraction: float, block_size: int, ops: Ops, bounds_tokens: float = 1.0) -> None:
        """Create the choice for a model.

        Args:
            bounds_tokens: Bytes of a block's bounds, expressed as a number of tokens whose keys and values take as
                much.
        """
        self._fraction_units = math.floor(fraction * _UNITS_PER_WHOLE)
        self._block_size = block_size
        self._ops = ops
        self._bounds_tokens = bounds_tokens
        self.min_blocks = max(MIN_BLOCKS, -(-MIN_TOKENS // block_size))

    def num_attended(self, num_blocks: int) -> int:
        """Return the number of blocks that a decode of a request with `num_blocks` blocks reads."""
        return min(num_blocks, max(self.min_blocks, -(-num_blocks * self._fraction_units // _UNITS_PER_WHOLE)))

    def num_tokens_read(self, num_tokens: int) -> int:
        """Return how much a decode of a request with `num_tokens` reads, expressed in tokens: the chosen blocks and the
        bounds of all blocks.
        """
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
        """Choose blocks for queries (batch, Hq, D) of a layer. Returns None if all blocks are read or the layer has no
        bounds.
        """
        width = min(block_tables.shape[1], -(-max_seq_len // self._block_size))
        max_chosen = self.num_attended(width)
        if kv.bounds is None or max_chosen >= width:
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
        columns, num_chosen = self._best_columns(scores, num_blocks[:, None, None], max_chosen)
        rows = block_tables[:, None, :width].expand(-1, scores.shape[1], -1)
        blocks = rows.gather(2, columns.clamp(max=width - 1))
        lengths = (num_chosen[:, 0, 0] - num_blocks) * self._block_size + seq_lens
        return Chosen(
            columns=columns,
            block_tables=_head_blocks(blocks, kv.k).flatten(0, 1),
            seq_lens=lengths.to(torch.int32)[:, None].expand(-1, scores.shape[1]).contiguous().view(-1),
            max_seq_len=max_chosen * self._block_size,
        )

    def _best_columns(
        self, scores: torch.Tensor, num_blocks: torch.Tensor, max_chosen: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return columns (batch, heads, max_chosen), and the number that each request uses (batch, 1, 1)."""
        width = scores.shape[2]
        column = torch.arange(width, device=scores.device)
        is_required = (column == 0) | (column == num_blocks - 1)
        ranked = scores.masked_fill(is_required, math.inf).topk(max_chosen, 2).indices
        num_wanted = (num_blocks.long() * self._fraction_units + (_UNITS_PER_WHOLE - 1)) // _UNITS_PER_WHOLE
        num_chosen = torch.minimum(num_wanted.clamp(min=self.min_blocks), num_blocks)
        is_unused = column[:max_chosen] >= num_chosen
        return ranked.masked_fill(is_unused, width).sort(2).values, num_chosen


def heads_apart(kv: LayerKV) -> LayerKV:
    """Return the layer's KV cache for decode attention over chosen blocks: viewed as blocks of one head each."""
    return LayerKV(*(None if each is None else by_head(each) for each in kv[:4]))  # type: ignore[arg-type]


def by_head(cache: torch.Tensor) -> torch.Tensor:
    """View a cache (num_blocks, block_size, heads, ...) as blocks of one head each, (rows, block_size, 1, ...), without
    a copy.

    Row r of the view starts r head strides after the start of the cache. This works because the block stride is a
    multiple of the head stride in both layouts of the storage, NHD and HND (`kv_storage`): head h of block b is row b *
    (block stride / head stride) + h. The other rows start within another part of a block, such as its values, and must
    not be read. `_head_blocks` returns the valid row numbers.
    """
    num_blocks, block_size, heads = cache.shape[:3]
    block, slot, head = cache.stride()[:3]
    rows = (num_blocks - 1) * (block // head) + heads
    return cache.as_strided((rows, block_size, 1, *cache.shape[3:]), (head, slot, head, *cache.stride()[3:]))


def _head_blocks(blocks: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Convert block ids, (batch, heads, n), to row indices of the view that `by_head` returns."""
    block, _, head, _ = cache.stride()
    heads = torch.arange(cache.shape[2], dtype=torch.int32, device=blocks.device)
    return blocks * (block // head) + heads[:, None]
