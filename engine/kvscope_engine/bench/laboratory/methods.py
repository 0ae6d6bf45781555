"""The methods: each holds the keys and values of one layer in its own way, and attends one query a request to them.

Shapes: keys and values (B, T, Hkv, D), queries (B, H, D), results like queries. Owns what each keeps and what each
reads; knows no model. All but Linformer's projection read real keys: none was trained for.
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
    """One way to attend."""

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Keep what is needed of these."""

    def attend(self, query: Tensor) -> Tensor:
        """(B, H, D) -> (B, H, D), scaled by the root of D."""

    @property
    def held_bytes(self) -> int:
        """Of what is kept."""


class Contiguous:
    """Each request's keys and values in a row: torch's own attention."""

    def hold(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = (each.transpose(1, 2).contiguous() for each in (keys, values))

    def attend(self, query: Tensor) -> Tensor:
        return dense(query, self._keys, self._values)

    @property
    def held_bytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes


class Paged:
    """Blocks of 16 slots in a pool, attended by the engine's own operation; in order, or shuffled as after hours."""

    def __init__(self, *, is_shuffled: bool) -> None:
        self._is_shuffled = is_shuffled

    def hold(self, keys: Tensor, values: Tensor) -> None:
        batch, length, num_heads, dim = keys.shape
        width = -(-length // BLOCK_SIZE)
        num_blocks = batch * width
        draw = torch.Generator().manual_seed(0)
        places = torch.randperm(num_blocks, generator=draw) if self._is_shuffled else torch.arange(num_blocks)
        self._tables = places.view(batch, width).to(keys.device, torch.int32)
        self._lens = torch.full((batch,), length, dtype=torch.int32, device=keys.device)
        self._ops, self._length = ops_for(keys.device.type), length
        pool = keys.new_zeros(num_blocks, 2, BLOCK_SIZE, num_heads, dim)
        padding = (0, 0, 0, 0, 0, width * BLOCK_SIZE - length)
        for part, tensor in enumerate((keys, values)):
            whole = torch.nn.functional.pad(tensor, padding)
            pool[places.to(keys.device), part] = whole.reshape(num_blocks, BLOCK_SIZE, num_heads, dim)
        if keys.device.type == "cuda":  # as the engine lays blocks out there
            pool = pool.transpose(2, 3).contiguous().transpose(2, 3)
        self._pool = pool

    def attend(self, query: Tensor) -> Tensor:
        k, v = self._pool[:, 0], self._pool[:, 1]
        scale = query.shape[-1] ** -0.5
        return self._ops.decode(AttentionArgs(query, k, v, self._tables, self._lens, scale, max_seq_len=self._length))

    @property
    def held_bytes(self) -> int:
        return self._pool.nbytes + self._tables.nbytes


class Window:
    """The newest tokens alone (Longformer, Mistral); with `num_first` the first ones too (StreamingLLM)."""

    def __init__(self, fraction: float, num_first: int = 0) -> None:
        self._fraction, self._num_first = fraction, num_first

    def hold(self, keys: Tensor, values: Tensor) -> None:
        length = keys.shape[1]
        newest = max(BLOCK_SIZE, round(length * self._fraction) - self._num_first)
        first = min(self._num_first, max(0, length - newest))
        self._kept = [
            torch.cat((each[:, :first], each[:, -newest:]), 1).transpose(1, 2).contiguous() for each in (keys, values)
        ]

    def attend(self, query: Tensor) -> Tensor:
        return dense(query, *self._kept)

    @property
    def held_bytes(self) -> int:
        return sum(each.nbytes for each in self._kept)


def dense(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """(B, H, D) over (B, Hkv, T, D): the heads of a group are the rows of one product."""
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
"""By the name in the table."""
UNTRAINED: Final = frozenset({"low rank 1/4"})
"""Those that cannot stand in for attention before they were trained: no perplexity is asked of them."""
EXACT: Final = frozenset({FULL, "paged, in order", "paged, shuffled", "sparse 1"})
"""Those that read every token."""
