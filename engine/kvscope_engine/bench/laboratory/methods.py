"""Attention methods under comparison. Each stores the keys and values of one layer in its own way, and attends to them.

Shapes: keys and values (B, T, Hkv, D); one query per request, (B, H, D); results have the shape of the queries. Methods
are independent of the model. All except the low-rank projection work on the model's real keys without training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvscope_engine.bench.laboratory.sparse import Hierarchical, LargestBound, Oracle, Sparse
from kvscope_engine.bench.laboratory.untrained import HashBuckets, LowRank
from kvscope_kernels import ops_for
from kvscope_kernels.attention_args import AttentionArgs

BLOCK_SIZE: Final = 16


class AttentionMethod(Protocol):
    def store_kv(self, keys: Tensor, values: Tensor) -> None:
        """Store the parts of keys and values, (B, T, Hkv, D) each, that the attention method needs."""

    def attend(self, query: Tensor) -> Tensor:
        """Return the attention output for `query`: (B, H, D) -> (B, H, D), with scores scaled by 1/sqrt(D)."""

    @property
    def stored_bytes(self) -> int: ...


class Contiguous:
    """Full attention on contiguous keys and values, with torch's SDPA."""

    def store_kv(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = (each.transpose(1, 2).contiguous() for each in (keys, values))

    def attend(self, query: Tensor) -> Tensor:
        return dense(query, self._keys, self._values)

    @property
    def stored_bytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes


class Paged:
    """Full attention on a pool of 16-slot blocks with the engine's own attention operation.

    Blocks are in order, or shuffled as after hours of use.
    """

    def __init__(self, *, is_shuffled: bool) -> None:
        self._is_shuffled = is_shuffled

    def store_kv(self, keys: Tensor, values: Tensor) -> None:
        batch, length, num_heads, dim = keys.shape
        width = -(-length // BLOCK_SIZE)
        num_blocks = batch * width
        rng = torch.Generator().manual_seed(0)
        blocks = torch.randperm(num_blocks, generator=rng) if self._is_shuffled else torch.arange(num_blocks)
        self._tables = blocks.view(batch, width).to(keys.device, torch.int32)
        self._lens = torch.full((batch,), length, dtype=torch.int32, device=keys.device)
        self._ops, self._length = ops_for(keys.device.type), length
        pool = keys.new_zeros(num_blocks, 2, BLOCK_SIZE, num_heads, dim)
        padding = (0, 0, 0, 0, 0, width * BLOCK_SIZE - length)
        for part, tensor in enumerate((keys, values)):
            padded = torch.nn.functional.pad(tensor, padding)
            pool[blocks.to(keys.device), part] = padded.reshape(num_blocks, BLOCK_SIZE, num_heads, dim)
        if keys.device.type == "cuda":  # the engine's block layout on a GPU
            pool = pool.transpose(2, 3).contiguous().transpose(2, 3)
        self._pool = pool

    def attend(self, query: Tensor) -> Tensor:
        k, v = self._pool[:, 0], self._pool[:, 1]
        scale = query.shape[-1] ** -0.5
        return self._ops.decode(AttentionArgs(query, k, v, self._tables, self._lens, scale, max_seq_len=self._length))

    @property
    def stored_bytes(self) -> int:
        return self._pool.nbytes + self._tables.nbytes


class Window:
    """Attention to the most recent tokens only (Longformer, Mistral).

    With `num_first`, also to the first tokens (StreamingLLM).
    """

    def __init__(self, fraction: float, num_first: int = 0) -> None:
        self._fraction, self._num_first = fraction, num_first

    def store_kv(self, keys: Tensor, values: Tensor) -> None:
        length = keys.shape[1]
        num_newest = max(BLOCK_SIZE, round(length * self._fraction) - self._num_first)
        num_first = min(self._num_first, max(0, length - num_newest))
        self._kept = [
            torch.cat((each[:, :num_first], each[:, -num_newest:]), 1).transpose(1, 2).contiguous()
            for each in (keys, values)
        ]

    def attend(self, query: Tensor) -> Tensor:
        return dense(query, *self._kept)

    @property
    def stored_bytes(self) -> int:
        return sum(each.nbytes for each in self._kept)


def dense(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend with SDPA: (B, H, D) over (B, Hkv, T, D) -> (B, H, D)."""
    batch, num_heads, dim = query.shape
    rows = query.view(batch, keys.shape[1], num_heads // keys.shape[1], dim)
    return scaled_dot_product_attention(rows, keys, values).reshape(batch, num_heads, dim)


FULL: Final = "full, contiguous"
METHODS: Final[dict[str, Callable[[], AttentionMethod]]] = {
    FULL: Contiguous,
    "paged, in order": lambda: Paged(is_shuffled=False),
    "paged, shuffled": lambda: Paged(is_shuffled=True),
    "sparse 1": lambda: Sparse(1.0),
    "sparse 1/2": lambda: Sparse(0.5),
    "sparse 1/4": lambda: Sparse(0.25),
    "sparse 1/8": lambda: Sparse(0.125),
    "largest bound 1/4": lambda: LargestBound(0.25),
    "oracle 1/4": lambda: Oracle(0.25),
    "hierarchical 1/4": lambda: Hierarchical(0.25),
    "window 1/4": lambda: Window(0.25),
    "window 1/4 + first": lambda: Window(0.25, BLOCK_SIZE),
    "LSH buckets": HashBuckets,
    "low rank 1/4": lambda: LowRank(0.25),
}
"""Factories of the attention methods, by name in the table."""
UNTRAINED: Final = frozenset({"low rank 1/4"})
"""Names of the methods that give no useful output unless a model was trained with them. Their perplexity is not
measured.
"""
EXACT: Final = frozenset({FULL, "paged, in order", "paged, shuffled", "sparse 1"})
"""Names of methods that attend to every token."""
