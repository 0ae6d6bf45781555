"""Two attention methods that need a model trained with them, applied to a model that was not, to show the effect of
training.
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
    """Attends to tokens whose keys share the query's bucket in one of 4 rounds of LSH, and to the newest 16 tokens.

    LSH uses random rotations (Reformer, arXiv 2001.04451). There are 32 buckets per round, so about an eighth of the
    tokens is read.
    """

    def store_kv(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = (each.transpose(1, 2).contiguous() for each in (keys, values))
        rng = torch.Generator().manual_seed(0)
        rotations = torch.randn(NUM_ROUNDS, keys.shape[-1], 8 * NUM_ROUNDS // 2, generator=rng)
        self._rotations = rotations.to(keys.device, keys.dtype)
        self._buckets = self._hash(self._keys).to(torch.uint8)  # (rounds, B, Hkv, T)

    def attend(self, query: Tensor) -> Tensor:
        rows = query.view(len(query), self._keys.shape[1], -1, query.shape[-1])
        query_buckets = self._hash(rows)  # (rounds, B, Hkv, group)
        is_visible = (query_buckets[..., None] == self._buckets[:, :, :, None]).any(0)
        is_visible[..., -NUM_NEWEST:] = True
        return scaled_dot_product_attention(rows, self._keys, self._values, attn_mask=is_visible).reshape(query.shape)

    def _hash(self, vectors: Tensor) -> Tensor:
        """Return the bucket of each vector, (rounds, B, Hkv, n): the nearest of the rotated axes, in positive or
        negative direction.
        """
        sides = torch.einsum("bhnd,rdk->rbhnk", vectors, self._rotations)
        return torch.cat((sides, -sides), -1).argmax(-1)

    @property
    def stored_bytes(self) -> int:
        return sum(each.nbytes for each in (self._keys, self._values, self._rotations, self._buckets))


class LowRank:
    """Projects keys and values along the token axis to `fraction` of their number (Linformer, arXiv 2006.04768).

    The projection is a random matrix, whereas a trained model has a learned one.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def store_kv(self, keys: Tensor, values: Tensor) -> None:
        rank = max(1, round(keys.shape[1] * self._fraction))
        rng = torch.Generator().manual_seed(0)
        matrix = torch.randn(rank, keys.shape[1], generator=rng) / math.sqrt(rank)
        matrix = matrix.to(keys.device, keys.dtype)
        self._kept = [torch.einsum("kt,bthd->bhkd", matrix, each).contiguous() for each in (keys, values)]

    def attend(self, query: Tensor) -> Tensor:
        rows = query.view(len(query), self._kept[0].shape[1], -1, query.shape[-1])
        keys, values = self._kept
        return scaled_dot_product_attention(rows, keys, values).reshape(query.shape)

    @property
    def stored_bytes(self) -> int:
        return sum(each.nbytes for each in self._kept)
