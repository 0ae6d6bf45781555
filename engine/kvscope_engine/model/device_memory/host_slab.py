"""The host tier's memory: one slab of exactly the size asked for, pinned where it is.

torch's own pinned allocator rounds each allocation up to a power of two (MemAscend's point: a 9 GiB cache takes
16); here whole pages are mapped and registered with CUDA in place. Owns the mapping; who uses a place it must not
know.

See docs/internals/decisions/0022-host-memory-is-one-exact-slab.md.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any, Protocol

import torch

from kvscope_engine.model.device_memory.host_headroom import free_host_bytes
from kvscope_engine.model.device_memory.memory_plan import MIB
from kvscope_telemetry.errors import BadInput


class Pinner(Protocol):
    """Locks memory in place for a device's direct access. An empty answer is success, else the reason in a line."""

    def pin(self, address: int, num_bytes: int) -> str:
        """Lock it."""

    def unpin(self, address: int) -> str:
        """Let go of what was locked from `address` on."""


class CudaPinner:
    """cudaHostRegister: pages stay where they are and copies from them need no staging."""

    def pin(self, address: int, num_bytes: int) -> str:
        """Lock it."""
        reason = _cuda_reason(_cudart().cudaHostRegister(address, num_bytes, 0))
        if reason:
            _forget_cuda_error()
        return reason

    def unpin(self, address: int) -> str:
        """Let go of what was locked from `address` on."""
        return _cuda_reason(_cudart().cudaHostUnregister(address))


class HostSlab:
    """`num_places` rows of `block_bytes`. Nothing is touched before it is used, but by pinning.

    Raises BadInput when that is more than is free.
    """

    def __init__(self, num_places: int, block_bytes: int, pinner: Pinner | None = None) -> None:
        self.num_bytes = num_places * block_bytes
        _check_room(self.num_bytes, free_host_bytes())
        self._map: mmap.mmap | None = None
        self.rows = torch.empty((num_places, 0), dtype=torch.uint8)
        """uint8 (num_places, block_bytes), page-aligned."""
        if self.num_bytes:
            self._map = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.rows = torch.frombuffer(self._map, dtype=torch.uint8).view(num_places, block_bytes)
        self.note = ""
        """Why it is not pinned although it was to be."""
        self._pinner = pinner
        self.is_pinned = pinner is not None and self._pin(pinner)

    @property
    def real_bytes(self) -> int:
        """Address space behind it: the size asked for, up to a whole page."""
        return exact_bytes(self.num_bytes)

    def close(self) -> None:
        """Give the memory back; no copy may be under way."""
        if self.is_pinned and self._pinner is not None:
            self._pinner.unpin(self.rows.data_ptr())
        self.is_pinned = False
        self.rows = torch.empty(0, 0, dtype=torch.uint8)
        self._map = None  # unmapped with its last view

    def _pin(self, pinner: Pinner) -> bool:
        reason = pinner.pin(self.rows.data_ptr(), self.real_bytes)
        if reason:
            self.note = f"{self.num_bytes / MIB:.0f} MiB of host memory are not pinned ({reason}): copies are slower"
        return not reason


def exact_bytes(num_bytes: int) -> int:
    """What a slab of `num_bytes` takes: whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def torch_pinned_bytes(num_bytes: int) -> int:
    """What torch's caching host allocator takes for `num_bytes`: the next power of two (CachingHostAllocator.h)."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0


def measured_torch_pinned_bytes(num_bytes: int) -> int | None:
    """The same as torch itself counts it, by pinning that much once; None without CUDA."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.init()  # type: ignore[no-untyped-call]  # without it torch counts nothing
    before = _pinned_bytes()
    tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    taken = _pinned_bytes() - before
    del tensor
    return taken


def _pinned_bytes() -> int:
    """By torch's count, which has no entries before the first."""
    return int(torch.cuda.host_memory_stats().get("active_bytes.current", 0))


def _check_room(num_bytes: int, free: int) -> None:
    if num_bytes > free:
        raise BadInput(
            f"--kv-host-memory asks for {num_bytes / MIB:.0f} MiB of host memory: {free / MIB:.0f} MiB are free"
        )


def _forget_cuda_error() -> None:
    """CUDA tells of an error again at the next kernel: let that be one that nobody needs."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _cuda_reason(error: Any) -> str:
    code = int(getattr(error, "value", error))
    return f"CUDA error {code}" if code else ""
