"""Wraps CUDA's virtual memory calls. A failed call raises a KvscopeError that names the call.

Owns the driver's structures; `cuda_pages` decides which page is mapped where.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from kvscope_telemetry.errors import KvscopeError


def open_driver(device: torch.device) -> CudaDriver:
    """Return the driver for the context that torch uses on `device`.

    Raises:
        KvscopeError: `cuda-bindings` is not installed, or there is no driver.
    """
    try:
        bindings = import_module("cuda.bindings.driver")
    except ImportError as error:
        raise KvscopeError(
            "allocator='virtual' on a GPU needs the package cuda-bindings: pip install 'cuda-bindings>=13.0.3,<14'"
        ) from error
    torch.zeros(1, device=device)  # makes torch create its context, for which memory must be mapped
    index = device.index if device.index is not None else torch.cuda.current_device()
    return CudaDriver(bindings, index)


class CudaDriver:
    """CUDA driver calls. `bindings` is the module `cuda.bindings.driver`, whose calls return `(CUresult, value...)`.

    A context is current in one thread only: call `enter` on each thread before it maps memory.
    """

    def __init__(self, bindings: Any, device_index: int) -> None:
        self._cuda = bindings
        self._properties = bindings.CUmemAllocationProp()
        self._properties.type = bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.requestedHandleTypes = bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
        self._access = bindings.CUmemAccessDesc()
        self._access.flags = bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for owner in (self._properties, self._access):
            owner.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            owner.location.id = device_index
        self._context = self._call("cuCtxGetCurrent")

    def enter(self) -> None:
        """Make the CUDA context current in the calling thread."""
        self._call("cuCtxSetCurrent", self._context)

    def granularity(self) -> int:
        """Return the bytes of the smallest page."""
        smallest = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties, smallest))

    def reserve(self, num_bytes: int, alignment: int) -> int:
        """Reserve a range of addresses without memory and return its first address."""
        return int(self._call("cuMemAddressReserve", num_bytes, alignment, 0, 0))

    def free_address(self, address: int, num_bytes: int) -> None:
        """Release an address range, in which nothing may be mapped."""
        self._call("cuMemAddressFree", address, num_bytes)

    def create(self, num_bytes: int) -> Any:
        return self._call("cuMemCreate", num_bytes, self._properties, 0)

    def release(self, handle: Any) -> None:
        """Free a page, which must not be mapped."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, num_bytes: int, handle: Any) -> None:
        """Map a whole page at an address. It must not be accessed before `allow`."""
        self._call("cuMemMap", address, num_bytes, 0, handle, 0)

    def allow(self, address: int, num_bytes: int) -> None:
        """Allow the device to read and write a range, all of which must be mapped."""
        self._call("cuMemSetAccess", address, num_bytes, [self._access], 1)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Unmap a page. The device must not be using it."""
        self._call("cuMemUnmap", address, num_bytes)

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            result, *values = getattr(self._cuda, name)(*arguments)
        except RuntimeError as error:  # the bindings found no driver
            raise KvscopeError(f"{name} failed: {str(error).splitlines()[0]:.120}") from error
        if result != self._cuda.CUresult.CUDA_SUCCESS:
            raise KvscopeError(f"{name} failed: {getattr(result, 'name', result)}")
        return values[0] if values else None
