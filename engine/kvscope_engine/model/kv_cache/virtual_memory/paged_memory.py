"""What the KV storage and the policy `virtual` need of memory that comes in pages, and which kind a device has."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Protocol

import torch

from kvscope_engine.policy.allocation.address_space import AddressSpace


class PagedMemory(Protocol):
    """Tensors over reserved addresses, one for each entry of `block_bytes`, each `(num_rows, ...)`.

    It is the policy's `PageMapper`: tensors may be read and written where blocks are mapped, and nowhere else.
    """

    @property
    def num_bytes(self) -> int:
        """Memory that there may be behind all addresses together."""

    def resident_bytes(self) -> int:
        """Memory that is behind them now, as the system that gives it tells."""

    def tensor(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Tensor number `index`, contiguous, not initialised. It may not be used after `close`."""

    def map(self, first_block: int, num_blocks: int) -> None:
        """Put memory behind these blocks in every tensor."""

    def unmap(self, first_block: int, num_blocks: int) -> None:
        """Give back the memory behind these blocks in every tensor."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


def page_bytes(device: torch.device) -> int:
    """The smallest piece of memory that can be mapped: 2 MiB on most GPUs, the system's page on a CPU.

    Raises KvscopeError when the driver cannot be asked.
    """
    if device.type == "cuda":
        from kvscope_engine.model.kv_cache.virtual_memory.cuda_driver import open_driver

        return open_driver(device).granularity()
    return mmap.PAGESIZE


def reserve(block_bytes: Sequence[int], space: AddressSpace, page_bytes: int, device: torch.device) -> PagedMemory:
    """Addresses for `space`, and on a GPU all the memory that will be behind them.

    Raises KvscopeError with the sizes when the system or the driver refuses.
    """
    if device.type == "cuda":
        from kvscope_engine.model.kv_cache.virtual_memory.cuda_driver import open_driver
        from kvscope_engine.model.kv_cache.virtual_memory.cuda_pages import CudaPages

        return CudaPages(open_driver(device), block_bytes, space, page_bytes, device)
    from kvscope_engine.model.kv_cache.virtual_memory.host_pages import HostPages

    return HostPages(block_bytes, space, page_bytes)
