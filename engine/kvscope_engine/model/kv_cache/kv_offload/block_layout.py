"""A block's bytes across the tensors of a storage, and where each part lies in a place of a lower tier.

A place holds the concatenation of that block's bytes of every tensor. Tensors are seen as rows of the widest words
that fit all of them, since copying bytes one by one is several times slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

import torch

_WORDS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class BlockTensors(Protocol):
    """What a storage shows of itself here."""

    @property
    def block_tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything that a block is made of, each contiguous with the blocks first."""


@dataclass(frozen=True, slots=True)
class TensorColumns:
    """One tensor of the storage, and its columns of a place."""

    blocks: torch.Tensor
    """Words (num_blocks, words of a block in this tensor)."""
    columns: slice


class BlockLayout:
    """The parts of all blocks of a storage."""

    def __init__(self, storage: BlockTensors) -> None:
        rows = [tensor.view(tensor.shape[0], -1).view(torch.uint8) for tensor in storage.block_tensors]
        self.num_blocks = rows[0].shape[0]
        self.block_bytes = sum(row.shape[1] for row in rows)
        self.dtype = _WORDS[math.gcd(8, *(row.shape[1] for row in rows))]
        self.device = rows[0].device
        self.parts: list[TensorColumns] = []
        start = 0
        for row in rows:
            words = row.view(self.dtype)
            self.parts.append(TensorColumns(words, slice(start, start + words.shape[1])))
            start += words.shape[1]

    def places(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of bytes (num_places, block_bytes) as words."""
        return rows.view(self.dtype)


def layout_text(storage: BlockTensors) -> str:
    """Dtypes and shapes of a block's parts: blocks of storages with the same text are interchangeable."""
    return ";".join(f"{tensor.dtype}{tuple(tensor.shape[1:])}" for tensor in storage.block_tensors)
