"""Defines the paged memory of the KV storage with `--allocator virtual`, and creates the implementation for a
device."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Protocol

import torch

from kvscope_engine.policy.allocation.address_space import AddressSpace


class PagedMemory(Protocol):
    """Tensors over reserved addresses, one per entry of `block_bytes`, each `(num_rows, ...)`.

    Implements the policy's `PageMapper`. Tensors may be accessed only where blocks are mapped.
    """

    @property
    def num_bytes(self) -> int:
        """Maximum bytes of memory that back the addresses."""

    def resident_bytes(self) -> int:
        """Return the bytes of memory that currently back the addresses; -1 if unknown."""

    def tensor(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor at `index`, contiguous and uninitialized. It must not be used after `close`."""

    def map(self, first_block: int, num_blocks: int) -> None:
        """Map memory behind these blocks in every tensor."""

    def unmap(self, first_block: int, num_blocks: int) -> None:
        """Free the memory behind these blocks in every tensor."""

    def close(self) -> None:
        """Unmap and free all memory. Idempotent."""


def page_bytes(device: torch.device) -> int:
    """Return the smallest mappable size in bytes: 2 MiB on most GPUs, the system's page size on a CPU.

    Raises KvscopeError if the driver cannot be queried.
    """
    if device.type == "cuda":
        from kvscope_engine.model.kv_cache.virtual_memory.cuda_driver import open_driver

        return open_driver(device).granularity()
    return mmap.PAGESIZE


def reserve(block_bytes: Sequence[int], space: AddressSpace, page_bytes: int, device: torch.device) -> PagedMemory:
    """Reserve addresses for `space` and, on a GPU, allocate all the memory that will back them.

    Raises KvscopeError with the sizes if the system or the driver refuses.
    """
    if device.type == "cuda":
        from kvscope_engine.model.kv_cache.virtual_memory.cuda_driver import open_driver
        from kvscope_engine.model.kv_cache.virtual_memory.cuda_pages import CudaPages

        return CudaPages(open_driver(device), block_bytes, space, page_bytes, device)
    from kvscope_engine.model.kv_cache.virtual_memory.host_pages import HostPages

    return HostPages(block_bytes, space, page_bytes)
