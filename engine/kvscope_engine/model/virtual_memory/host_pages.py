"""The host's memory in pages: anonymous memory that the system backs when it is first written.

Owns one reserved range. Mapping is the system's work, done on the first touch; giving back is `madvise`, and how
much there is, is read back by `mincore`. Huge pages are kept out, as one would back 512 pages at a touch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Final

import numpy as np
import torch

from kvscope_engine.model.virtual_memory.layout import Layout
from kvscope_engine.policy.address_space import MIB, AddressSpace
from kvscope_telemetry.errors import KvscopeError

NO_RESERVE: Final = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, which `mmap` names from Python 3.13 on: addresses count as no memory."""


class HostPages:
    """`PagedMemory` of the host. Raises KvscopeError when the system refuses the addresses."""

    def __init__(self, block_bytes: Sequence[int], space: AddressSpace, page_bytes: int) -> None:
        self._layout = Layout.of(block_bytes, space, page_bytes)
        self._memory = _reserve(self._layout.num_bytes, space)
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """Memory that there may be behind all addresses together."""
        return self._layout.num_pages * self._layout.page_bytes

    def resident_bytes(self) -> int:
        """Pages that the system has in memory, times their size. One that was read and never written counts too."""
        if self._is_closed:
            return 0
        pages = np.zeros(-(-self._layout.num_bytes // mmap.PAGESIZE), np.uint8)
        address = np.frombuffer(self._memory, np.uint8).ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = (
            ctypes.c_void_p(address),
            ctypes.c_size_t(self._layout.num_bytes),
            ctypes.c_void_p(pages.ctypes.data),
        )
        if libc.mincore(*arguments):
            raise KvscopeError(f"mincore failed: {os.strerror(ctypes.get_errno())}")
        return int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE

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
