"""Host memory in pages: a reserved range of anonymous memory, whose pages the kernel allocates at the first write.

`madvise` frees pages, and the resident size is read from `/proc/self/pagemap`. Huge pages are disabled, because the
first write to one would allocate 512 pages.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Final

import numpy as np
import torch

from kvscope_engine.model.kv_cache.virtual_memory.page_layout import PageLayout
from kvscope_engine.policy.allocation.address_space import MIB, AddressSpace
from kvscope_telemetry.errors import KvscopeError

NO_RESERVE: Final = 0x4000 if sys.platform == "linux" else 0
"""Linux's flag MAP_NORESERVE: mapped addresses do not count against the system's memory limit until they are written. 0
on other systems.

Python's `mmap` module defines the flag only from 3.13 on.
"""

PAGE_MAP: Final = "/proc/self/pagemap"
"""File with one 64-bit number per page of this process.

Bit 63: the page is present; bit 56: no other process maps it.
"""
OWN_PAGE_BITS: Final = np.uint64(1 << 63 | 1 << 56)
"""Bits of an entry of `PAGE_MAP` that are set for a page that counts as resident memory of this process."""
CHUNK_PAGES: Final = 1 << 20
"""Number of pages whose entries are read at a time."""


class HostPages:
    """`PagedMemory` in host memory. Raises KvscopeError if the addresses cannot be reserved."""

    def __init__(self, block_bytes: Sequence[int], space: AddressSpace, page_bytes: int) -> None:
        self._layout = PageLayout.of(block_bytes, space, page_bytes)
        self._memory = _reserve(self._layout.num_bytes, space)
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        return self._layout.num_pages * self._layout.page_bytes

    def resident_bytes(self) -> int:
        """Return the bytes of the pages that currently back the addresses; -1 if the system does not report them.

        A page that was read but never written is the system's shared zero page and does not count.
        """
        if self._is_closed:
            return 0
        first = np.frombuffer(self._memory, np.uint8).ctypes.data // mmap.PAGESIZE
        num_pages = self._layout.num_bytes // mmap.PAGESIZE
        try:
            counts = (
                _num_own_pages(first + start, min(CHUNK_PAGES, num_pages - start))
                for start in range(0, num_pages, CHUNK_PAGES)
            )
            return sum(counts) * mmap.PAGESIZE
        except OSError:
            return -1

    def tensor(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor at `index`. The addresses stay reserved as long as it exists."""
        flat = torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=self._layout.offsets[index])
        return flat.view(tuple(shape))

    def map(self, first_block: int, num_blocks: int) -> None:
        """Do nothing: the system maps a page when it is written."""

    def unmap(self, first_block: int, num_blocks: int) -> None:
        """Free the pages behind these blocks. Reading them afterwards returns zeros."""
        for pages in self._layout.spans(first_block, num_blocks):
            size = self._layout.page_bytes
            self._memory.madvise(mmap.MADV_DONTNEED, pages.start * size, len(pages) * size)

    def close(self) -> None:
        """Free all memory. The addresses are released with the last tensor that uses them. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._memory.madvise(mmap.MADV_DONTNEED)


def _num_own_pages(first: int, count: int) -> int:
    """Return the number of resident pages among `count` pages, starting at page number `first`. Raises OSError if
    unknown.
    """
    entries = np.fromfile(PAGE_MAP, np.uint64, count=count, offset=8 * first)
    return int(np.count_nonzero((entries & OWN_PAGE_BITS) == OWN_PAGE_BITS))


def _reserve(num_bytes: int, space: AddressSpace) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, OverflowError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise KvscopeError(
            f"no address space for the KV cache: {space.num_slots} slots of {space.slot_blocks} blocks are"
            f" {num_bytes / MIB:.0f} MiB ({reason}); give a smaller --max-model-len or --max-num-seqs"
        ) from error
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel built without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
