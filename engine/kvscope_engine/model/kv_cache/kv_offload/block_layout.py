"""Describes where a block's bytes are: in which tensors of a storage, and at which offsets in a slot of a lower tier.

A slot holds the concatenation of a block's bytes in every tensor. Tensors are viewed as rows of the widest word type
that divides all of them, because copying single bytes is several times slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

import torch

_WORD_DTYPES: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class BlockTensors(Protocol):
    """Interface of a storage of KV blocks that lower tiers need to copy blocks: only its tensors."""

    @property
    def block_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors that a block consists of, each contiguous with blocks as the first dimension."""


@dataclass(frozen=True, slots=True)
class TensorColumns:
    """A tensor of the storage, and the columns of a slot that hold its bytes."""

    blocks: torch.Tensor
    """View of the tensor as words, shape (num_blocks, words of a block in this tensor)."""
    columns: slice


class BlockLayout:
    """Tensors that the blocks of a storage consist of, and their columns in a slot."""

    def __init__(self, storage: BlockTensors) -> None:
        rows = [tensor.view(tensor.shape[0], -1).view(torch.uint8) for tensor in storage.block_tensors]
        self.num_blocks = rows[0].shape[0]
        self.block_bytes = sum(row.shape[1] for row in rows)
        self.dtype = _WORD_DTYPES[math.gcd(8, *(row.shape[1] for row in rows))]
        self.device = rows[0].device
        self.parts: list[TensorColumns] = []
        start = 0
        for row in rows:
            words = row.view(self.dtype)
            self.parts.append(TensorColumns(words, slice(start, start + words.shape[1])))
            start += words.shape[1]

    def slots(self, rows: torch.Tensor) -> torch.Tensor:
        """View slots given as bytes, shape (num_slots, block_bytes), as words."""
        return rows.view(self.dtype)


def layout_text(storage: BlockTensors) -> str:
    """Return the dtypes and shapes of a block's tensors. Storages with equal text have interchangeable blocks."""
    return ";".join(f"{tensor.dtype}{tuple(tensor.shape[1:])}" for tensor in storage.block_tensors)
