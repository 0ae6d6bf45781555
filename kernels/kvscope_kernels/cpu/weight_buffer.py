"""Memory for packed weights, in large pieces that the system may back with pages of 2 MiB.

A matmul reads each weight once, at memory bandwidth. With pages of 4 KiB, a core stalls at the end of each page.
Measured on one core: 19 to 22 GB/s with small pages, 25 with large ones.
"""

import torch
from torch import Tensor

from kvscope_kernels.cpu.library import library

CHUNK_BYTES = 64 << 20
"""Minimum bytes of a piece of memory. Pages that are never written use no memory."""
_ALIGNMENT = 64


class WeightBuffer:
    """Allocates tensors in large pieces of memory. A piece is freed together with the last tensor in it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._num_used_bytes = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor. Raises RuntimeError without memory, like torch."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if self._num_used_bytes + num_bytes > len(self._chunk):
            self._allocate_chunk(num_bytes)
        start, self._num_used_bytes = (
            self._num_used_bytes,
            self._num_used_bytes + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT,
        )
        return self._chunk[start : start + num_bytes].view(dtype).view(shape)

    def _allocate_chunk(self, num_bytes: int) -> None:
        self._chunk = torch.empty(max(num_bytes, CHUNK_BYTES), dtype=torch.uint8)
        self._num_used_bytes = 0
        native = library()
        if native is not None:
            native.kvscope_large_pages(self._chunk.data_ptr(), len(self._chunk))
