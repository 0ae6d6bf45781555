"""GPU memory in pages: all are allocated at the start, and mapped behind reserved addresses as blocks are used.

Owns the pages and their mapping. Addresses never change, so captured graphs stay valid. Access is set after each
mapping; nothing is unmapped before the device is idle.

One additional page, the floor, is mapped at the start of every tensor whose first blocks are unused: Triton queries the
driver about the address of each tensor argument, and refuses an address without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from kvscope_engine.model.kv_cache.virtual_memory.cuda_driver import CudaDriver
from kvscope_engine.model.kv_cache.virtual_memory.page_layout import PageLayout
from kvscope_engine.policy.allocation.address_space import MIB, AddressSpace
from kvscope_telemetry.errors import KvscopeError


class CudaPages:
    """`PagedMemory` of a GPU. `synchronize` waits for all work enqueued on the device (default: torch's).

    Raises KvscopeError, after releasing everything, if the driver refuses.
    """

    def __init__(
        self,
        driver: CudaDriver,
        block_bytes: Sequence[int],
        space: AddressSpace,
        page_bytes: int,
        device: torch.device,
        *,
        synchronize: Callable[[], object] | None = None,
    ) -> None:
        self._driver = driver
        self._device = device
        self._layout = PageLayout.of(block_bytes, space, page_bytes)
        self._synchronize = synchronize or (lambda: torch.cuda.synchronize(device))
        self._free: list[Any] = []  # handles of unmapped pages
        self._mapped: dict[int, Any] = {}  # page number in the range -> handle of the page there
        self._first_pages = frozenset(offset // page_bytes for offset in self._layout.offsets)
        self._floors: set[int] = set()  # pages in `_first_pages` where the floor is mapped
        self._floor: Any = None
        self._address: int | None = None
        try:
            self._address = driver.reserve(self._layout.num_bytes, page_bytes)
            for _ in range(self._layout.num_pages):
                self._free.append(driver.create(page_bytes))
            self._floor = driver.create(page_bytes)
            for page in sorted(self._first_pages):
                self._map_placeholder(page)
        except KvscopeError as error:
            self.close()
            raise KvscopeError(
                f"no memory for the KV cache: {self._layout.num_pages} pages of {page_bytes / MIB:.2f} MiB behind"
                f" {self._layout.num_bytes / MIB:.0f} MiB of addresses ({error});"
                " give a smaller --kv-memory, --max-model-len or --max-num-seqs"
            ) from error

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages, without the floor page."""
        return self._layout.num_pages * self._layout.page_bytes

    def resident_bytes(self) -> int:
        return len(self._mapped) * self._layout.page_bytes

    def tensor(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor for entry `index` of `block_bytes`. The tensor does not own its memory."""
        assert self._address is not None, "the memory is closed"
        return tensor_at(self._address + self._layout.offsets[index], shape, dtype, self._device)

    def map(self, first_block: int, num_blocks: int) -> None:
        self._driver.enter()
        for pages in self._layout.spans(first_block, num_blocks):
            for page in pages:
                assert page not in self._mapped, f"page {page} is mapped twice"
                if page in self._floors:
                    self._synchronize()
                    self._unmap_placeholder(page)
                self._driver.map(self._page_address(page), self._layout.page_bytes, self._free[-1])
                self._mapped[page] = self._free.pop()
            self._driver.allow(self._page_address(pages.start), len(pages) * self._layout.page_bytes)

    def unmap(self, first_block: int, num_blocks: int) -> None:
        """Wait for the device, then unmap the pages behind these blocks. The pages can be mapped again elsewhere."""
        self._driver.enter()
        self._synchronize()
        for pages in self._layout.spans(first_block, num_blocks):
            for page in pages:
                self._unmap_page(page)
                if page in self._first_pages:
                    self._map_placeholder(page)

    def close(self) -> None:
        """Unmap and free all pages and release the addresses, in reverse order of creation. Idempotent."""
        if self._address is None:
            return
        self._driver.enter()
        self._synchronize()
        for page in reversed(list(self._mapped)):
            self._unmap_page(page)
        for page in sorted(self._floors, reverse=True):
            self._unmap_placeholder(page)
        if self._floor is not None:
            self._free.append(self._floor)
            self._floor = None
        while self._free:
            self._driver.release(self._free.pop())
        self._driver.free_address(self._address, self._layout.num_bytes)
        self._address = None

    def _unmap_page(self, page: int) -> None:
        self._driver.unmap(self._page_address(page), self._layout.page_bytes)
        self._free.append(self._mapped.pop(page))

    def _map_placeholder(self, page: int) -> None:
        self._driver.map(self._page_address(page), self._layout.page_bytes, self._floor)
        self._floors.add(page)
        self._driver.allow(self._page_address(page), self._layout.page_bytes)

    def _unmap_placeholder(self, page: int) -> None:
        self._driver.unmap(self._page_address(page), self._layout.page_bytes)
        self._floors.discard(page)

    def _page_address(self, page: int) -> int:
        assert self._address is not None, "the memory is closed"
        return self._address + page * self._layout.page_bytes


def tensor_at(address: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a contiguous tensor over the memory at `address`. The tensor does not own the memory, and creating
    the tensor does not access it.
    """
    empty = torch.empty(0, dtype=dtype, device=device)  # has a device with an index, which the storage needs too
    storage = torch._C._construct_storage_from_data_pointer(address, empty.device, prod(shape) * dtype.itemsize)
    return empty.set_(storage).view(tuple(shape))
