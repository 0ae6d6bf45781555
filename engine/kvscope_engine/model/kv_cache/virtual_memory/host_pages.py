"""The host's memory in pages: anonymous memory that the system backs when it is first written.

Owns one reserved range. Mapping is the system's work, done on the first touch; giving back is `madvise`, and how
much there is, is read back from `/proc/self/pagemap`. Huge pages are kept out, as one would back 512 pages at once.
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
"""MAP_NORESERVE, which `mmap` names from Python 3.13 on: addresses count as no memory."""

PAGE_MAP: Final = "/proc/self/pagemap"
"""Of each page of this process 8 bytes, of which bit 63 says that it is there and bit 56 that it is its alone."""
IS_OWN: Final = np.uint64(1 << 63 | 1 << 56)
CHUNK: Final = 1 << 20


class HostPages:
    """`PagedMemory` of the host. Raises KvscopeError when the system refuses the addresses."""

    def __init__(self, block_bytes: Sequence[int], space: AddressSpace, page_bytes: int) -> None:
        self._layout = PageLayout.of(block_bytes, space, page_bytes)
        self._memory = _reserve(self._layout.num_bytes, space)
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """Memory that there may be behind all addresses together."""
        return self._layout.num_pages * self._layout.page_bytes

    def resident_bytes(self) -> int:
        """Pages that the system has put behind the addresses, times their size; -1 where it does not tell.

        A page that was read and never written is the system's one page of zeros, and does not count.
        """
        if self._is_closed:
            return 0
        first = np.frombuffer(self._memory, np.uint8).ctypes.data // mmap.PAGESIZE
        num_pages = self._layout.num_bytes // mmap.PAGESIZE
        try:
            counts = (_num_own_pages(first + at, min(CHUNK, num_pages - at)) for at in range(0, num_pages, CHUNK))
            return sum(counts) * mmap.PAGESIZE
        except OSError:
            return -1

    def tensor(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Tensor number `index`; it keeps the addresses reserved as long as it lives."""
        flat = torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=self._layout.offsets[index])
        return flat.view(tuple(shape))

    def map(self, first_block: int, num_blocks: int) -> None:
        """Nothing: the system does it when a page is written."""

    def unmap(self, first_block: int, num_blocks: int) -> None:
        """The system takes the pages back; what is read there from now on is zero."""
        for pages in self._layout.spans(first_block, num_blocks):
            size = self._layout.page_bytes
            self._memory.madvise(mmap.MADV_DONTNEED, pages.start * size, len(pages) * size)

    def close(self) -> None:
        """All memory goes back at once, the addresses with the last tensor over them."""
        if not self._is_closed:
            self._is_closed = True
            self._memory.madvise(mmap.MADV_DONTNEED)


def _num_own_pages(first: int, count: int) -> int:
    """How many of `count` pages from page number `first` on have memory. Raises OSError where nobody tells."""
    entries = np.fromfile(PAGE_MAP, np.uint64, count=count, offset=8 * first)
    return int(np.count_nonzero((entries & IS_OWN) == IS_OWN))


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
