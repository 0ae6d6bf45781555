"""Sparse attention: reads only the blocks estimated to receive most of the attention (Quest, arXiv 2406.10774).

Blocks are ranked in one level or in two, as the engine does with `--sparse-decode`. In addition to the keys, the
smallest and the largest key of each block, head and dimension are stored.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from kvscope_kernels.attention_scores.block_scores import NEAR

BLOCK_SIZE: Final = 16
MIN_BLOCKS: Final = 3
"""Minimum number of blocks that are read: the first, the newest, and one that is selected."""
GROUP_BLOCKS: Final = 8
GROUP_SLACK: Final = 2
"""Number of candidate blocks in two-level ranking, as a multiple of the number of blocks to select."""


class Sparse:
    """Selects the top `fraction` of the blocks per request and KV head, always including the first and the newest
    block.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def store_kv(self, keys: Tensor, values: Tensor) -> None:
        self._length = keys.shape[1]
        self._blocks = (_in_blocks(keys), _in_blocks(values))  # (B, Hkv, n, 16, D)
        padded = _in_blocks(keys, pad_last=True)
        self._low, self._high = padded.amin(3), padded.amax(3)

    def attend(self, query: Tensor) -> Tensor:
        rows = query.view(len(query), self._low.shape[1], -1, query.shape[-1])  # (B, Hkv, group, D)
        return self._attend_to_blocks(rows, self._select_blocks(rows)).reshape(query.shape)

    def _select_blocks(self, rows: Tensor) -> Tensor:
        """Return the selected blocks, (B, Hkv, k): one selection for all query heads that share keys."""
        shares = _shares(rows, self._low, self._high)
        shares[..., 0] = shares[..., -1] = math.inf
        return shares.topk(self._num_wanted, -1).indices

    @property
    def _num_wanted(self) -> int:
        return min(self._low.shape[2], max(MIN_BLOCKS, math.ceil(self._low.shape[2] * self._fraction)))

    def _attend_to_blocks(self, rows: Tensor, chosen: Tensor) -> Tensor:
        keys, values = (_gather_blocks(each, chosen) for each in self._blocks)
        num_padding = self._blocks[0].shape[2] * BLOCK_SIZE - self._length
        mask = None
        if num_padding:
            slot = chosen[..., None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=chosen.device)
            mask = (slot < self._length).flatten(2)[:, :, None]
        return scaled_dot_product_attention(rows, keys, values, attn_mask=mask)

    @property
    def stored_bytes(self) -> int:
        return sum(int(each.nbytes) for each in (*self._blocks, self._low, self._high))


class Hierarchical(Sparse):
    """Selects groups of 8 blocks first, then blocks within the selected groups."""

    def store_kv(self, keys: Tensor, values: Tensor) -> None:
        super().store_kv(keys, values)
        missing = -self._low.shape[2] % GROUP_BLOCKS
        low = pad(self._low, (0, 0, 0, missing), value=math.inf)
        high = pad(self._high, (0, 0, 0, missing), value=-math.inf)
        by_group = (*low.shape[:2], -1, GROUP_BLOCKS, low.shape[3])
        self._group_low, self._group_high = low.view(by_group).amin(3), high.view(by_group).amax(3)

    def _select_blocks(self, rows: Tensor) -> Tensor:
        num_blocks = self._low.shape[2]
        groups = _shares(rows, self._group_low, self._group_high)
        groups[..., 0] = groups[..., -1] = math.inf
        num_groups = 2 + -(-self._num_wanted * GROUP_SLACK // GROUP_BLOCKS)  # in addition to the first and the newest
        selected_groups = groups.topk(min(num_groups, groups.shape[-1]), -1).indices
        blocks = (
            selected_groups[..., None] * GROUP_BLOCKS + torch.arange(GROUP_BLOCKS, device=selected_groups.device)
        ).flatten(2)
        inside = blocks.clamp(max=num_blocks - 1)
        shares = _shares(rows, *(_gather_rows(each, inside) for each in (self._low, self._high)))
        shares[blocks >= num_blocks] = -math.inf
        shares[(blocks == 0) | (blocks == num_blocks - 1)] = math.inf
        best = shares.topk(min(self._num_wanted, num_blocks), -1).indices
        return inside.gather(2, best)

    @property
    def stored_bytes(self) -> int:
        groups: int = self._group_low.nbytes + self._group_high.nbytes
        return super().stored_bytes + groups


# Other rankings of the same blocks, to show how much the ranking matters.
class LargestBound(Sparse):
    """Quest's ranking of a block: the upper bound of the scores of its keys, maximum over the query heads that share
    them.
    """

    def _select_blocks(self, rows: Tensor) -> Tensor:
        up, down = rows.clamp(min=0), rows.clamp(max=0)
        bounds = (up @ self._high.mT + down @ self._low.mT).amax(2)
        bounds[..., 0] = bounds[..., -1] = math.inf
        return bounds.topk(self._num_wanted, -1).indices


class Oracle(Sparse):
    """Ideal ranking by the actual attention on each block, for which every key is read."""

    def _select_blocks(self, rows: Tensor) -> Tensor:
        keys = self._blocks[0].flatten(2, 3)[:, :, : self._length]  # (B, Hkv, T, D)
        weights = (rows @ keys.mT).float().mul_(rows.shape[-1] ** -0.5).softmax(-1).sum(2)
        padded = pad(weights, (0, -self._length % BLOCK_SIZE))
        shares: Tensor = padded.view(*padded.shape[:2], -1, BLOCK_SIZE).sum(-1)
        shares[..., 0] = shares[..., -1] = math.inf
        return shares.topk(self._num_wanted, -1).indices


def _in_blocks(tensor: Tensor, *, pad_last: bool = False) -> Tensor:
    """Reshape (B, T, Hkv, D) to (B, Hkv, n, 16, D).

    The last block is padded with zeros, or with its last token if `pad_last`.
    """
    missing = -tensor.shape[1] % BLOCK_SIZE
    if missing and pad_last:
        tensor = torch.cat((tensor, tensor[:, -1:].expand(-1, missing, -1, -1)), 1)
    elif missing:
        tensor = pad(tensor, (0, 0, 0, 0, 0, missing))
    batch, _, heads, dim = tensor.shape
    return tensor.reshape(batch, -1, BLOCK_SIZE, heads, dim).permute(0, 3, 1, 2, 4).contiguous()


def _shares(rows: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Estimate each block's share of attention: (B, Hkv, group, D) and (B, Hkv, n, D) -> (B, Hkv, n).

    The engine's `block_scores` returns the logarithm of the same estimate.
    """
    up, down, far = rows.clamp(min=0), rows.clamp(max=0), 1.0 - NEAR
    estimates = (NEAR * up + far * down) @ high.mT + (far * up + NEAR * down) @ low.mT
    shares: Tensor = (estimates.float() * rows.shape[-1] ** -0.5).softmax(-1).sum(2)
    return shares


def _gather_blocks(blocks: Tensor, chosen: Tensor) -> Tensor:
    """Gather blocks: (B, Hkv, n, 16, D) and (B, Hkv, k) -> (B, Hkv, k * 16, D)."""
    batch, heads = torch.meshgrid(*map(torch.arange, blocks.shape[:2]), indexing="ij")
    indices = batch[..., None].to(chosen.device), heads[..., None].to(chosen.device), chosen
    return blocks[indices].flatten(2, 3)


def _gather_rows(table: Tensor, chosen: Tensor) -> Tensor:
    """Gather rows: (B, Hkv, n, D) and (B, Hkv, k) -> (B, Hkv, k, D)."""
    return table.gather(2, chosen[..., None].expand(-1, -1, -1, table.shape[3]))
