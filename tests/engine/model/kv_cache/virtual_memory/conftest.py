"""A fake driver module that records its calls and refuses what CUDA would refuse."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

MIB = 1 << 20


class Result:
    """Stand-in for a CUresult."""

    def __init__(self, name: str) -> None:
        self.name = name


class FakeCuda:
    """The used part of `cuda.bindings.driver`. `calls` are (name, arguments); `fail` maps a name to the number of its
    call that fails.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.fail: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.base = 1 << 40
        self.reserved = 0
        self.handles: set[int] = set()
        self.mapped: dict[int, int] = {}
        self.allowed: set[int] = set()
        self.page_bytes = 2 * MIB
        self.is_busy = False
        success = Result("CUDA_SUCCESS")
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=success)
        for kind in ("CUmemAllocationProp", "CUmemAccessDesc"):
            setattr(self, kind, lambda: SimpleNamespace(location=SimpleNamespace()))
        self.CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
        self.CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_NONE="none")
        self.CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
        self.CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="rw")
        self.CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="minimum")

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *arguments: self._call(name, arguments)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def synchronize(self) -> None:
        self.calls.append(("synchronize", ()))
        self.is_busy = False

    def _call(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls.append((name, arguments))
        self.counts[name] = self.counts.get(name, 0) + 1
        if self.fail.get(name) == self.counts[name]:
            return (Result("CUDA_ERROR_OUT_OF_MEMORY"),)
        value = getattr(self, f"_{name}")(*arguments)
        return (self.CUresult.CUDA_SUCCESS,) if value is None else (self.CUresult.CUDA_SUCCESS, value)

    def _cuCtxGetCurrent(self) -> str:
        return "context"

    def _cuCtxSetCurrent(self, context: str) -> None:
        assert context == "context"

    def _cuMemGetAllocationGranularity(self, properties: Any, option: str) -> int:
        assert (properties.type, properties.requestedHandleTypes, properties.location.type) == (
            "pinned",
            "none",
            "device",
        )
        assert (properties.location.id, option) == (3, "minimum")
        return self.page_bytes

    def _cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        assert (size % self.page_bytes, alignment, address, flags) == (0, self.page_bytes, 0, 0)
        self.reserved = size
        return self.base

    def _cuMemAddressFree(self, address: int, size: int) -> None:
        assert (address, size) == (self.base, self.reserved)
        assert not self.mapped, "something is mapped there"
        self.reserved = 0

    def _cuMemCreate(self, size: int, properties: Any, flags: int) -> int:
        assert (size, properties.location.id, flags) == (self.page_bytes, 3, 0)
        handle = 100 + self.counts["cuMemCreate"]
        self.handles.add(handle)
        return handle

    def _cuMemRelease(self, handle: int) -> None:
        assert handle not in self.mapped.values(), "the page is mapped"
        self.handles.remove(handle)

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert (size, offset, flags) == (self.page_bytes, 0, 0)
        assert (address - self.base) % size == 0
        assert self.base <= address < self.base + self.reserved, "not in the range"
        assert handle in self.handles
        assert address not in self.mapped
        self.mapped[address] = handle

    def _cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> None:
        assert (access[0].flags, access[0].location.type, access[0].location.id, count) == ("rw", "device", 3, 1)
        addresses = set(range(address, address + size, self.page_bytes))
        assert addresses <= set(self.mapped), "access is set where nothing is mapped"
        self.allowed |= addresses

    def _cuMemUnmap(self, address: int, size: int) -> None:
        assert size == self.page_bytes
        assert not self.is_busy, "the device may be using the page"
        del self.mapped[address]
        self.allowed.discard(address)


@pytest.fixture
def cuda() -> FakeCuda:
    """Fake driver of device 3 with pages of 2 MiB."""
    return FakeCuda()
