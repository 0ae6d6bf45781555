"""Two methods that need a model trained with them, on a model that was not: their loss shows what the
training is for.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NUM_ROUNDS: Final = 4
NUM_NEWEST: Final = 16


class HashBuckets:
    """Tokens whose keys fall into the query's bucket in one of 4 rounds of hashing by random rotations (Reformer, arXiv
    2001.04451), and the newest 16; as many buckets as leave each about an eighth of the tokens in all."""

    def hold(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = (each.transpose(1, 2).contiguous() for each in (keys, values))
        draw = torch.Generator().manual_seed(0)
        half = torch.randn(NUM_ROUNDS, keys.shape[-1], 8 * NUM_ROUNDS // 2, generator=draw)
        self._rotations = half.to(keys.device, keys.dtype)
        self._buckets = self._hash(self._keys).to(torch.uint8)  # (rounds, B, Hkv, T)

    def attend(self, query: Tensor) -> Tensor:
        rows = query.view(len(query), self._keys.shape[1], -1, query.shape[-1])
        mine = self._hash(rows)  # (rounds, B, Hkv, group)
        seen = (mine[..., None] == self._buckets[:, :, :, None]).any(0)
        seen[..., -NUM_NEWEST:] = True
        return scaled_dot_product_attention(rows, self._keys, self._values, attn_mask=seen).reshape(query.shape)

    def _hash(self, vectors: Tensor) -> Tensor:
        """The direction, of both ends of each axis, that a vector is nearest to: (rounds, B, Hkv, n)."""
        sides = torch.einsum("bhnd,rdk->rbhnk", vectors, self._rotations)
        return torch.cat((sides, -sides), -1).argmax(-1)

    @property
    def held_bytes(self) -> int:
        return sum(each.nbytes for each in (self._keys, self._values, self._rotations, self._buckets))


class LowRank:
    """Keys and values projected along the tokens to a fraction of their number (Linformer, arXiv 2006.04768), by random
    numbers where a model would have learned ones."""

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def hold(self, keys: Tensor, values: Tensor) -> None:
        rank = max(1, round(keys.shape[1] * self._fraction))
        draw = torch.Generator().manual_seed(0)
        matrix = torch.randn(rank, keys.shape[1], generator=draw) / math.sqrt(rank)
        matrix = matrix.to(keys.device, keys.dtype)
        self._kept = [torch.einsum("kt,bthd->bhkd", matrix, each).contiguous() for each in (keys, values)]

    def attend(self, query: Tensor) -> Tensor:
        rows = query.view(len(query), self._kept[0].shape[1], -1, query.shape[-1])
        keys, values = self._kept
        return scaled_dot_product_attention(rows, keys, values).reshape(query.shape)

    @property
    def held_bytes(self) -> int:
        return sum(each.nbytes for each in self._kept)
