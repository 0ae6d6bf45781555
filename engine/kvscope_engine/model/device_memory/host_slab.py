"""Memory of the host tier: one anonymous mapping of exactly the requested size, pinned in place.

torch's pinned allocator rounds each allocation up to a power of two (see MemAscend: a 9 GiB cache takes 16 GiB). Here,
whole pages are mapped and registered with CUDA in place. Owns the mapping; must not depend on the meaning of the rows.

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
    """Locks memory in place for direct access by a device. Methods return an empty string on success, else the
    reason."""

    def pin(self, address: int, num_bytes: int) -> str: ...

    def unpin(self, address: int) -> str: ...


class CudaPinner:
    """Pins memory with cudaHostRegister, so that copies need no staging buffer."""

    def pin(self, address: int, num_bytes: int) -> str:
        reason = _cuda_reason(_cudart().cudaHostRegister(address, num_bytes, 0))
        if reason:
            _clear_cuda_error()
        return reason

    def unpin(self, address: int) -> str:
        return _cuda_reason(_cudart().cudaHostUnregister(address))


class HostSlab:
    """Host memory of `num_slots` rows of `block_bytes` bytes. Unless pinned, pages are allocated when first written.

    Raises BadInput if the size exceeds the free host memory.
    """

    def __init__(self, num_slots: int, block_bytes: int, pinner: Pinner | None = None) -> None:
        self.num_bytes = num_slots * block_bytes
        _check_free_memory(self.num_bytes, free_host_bytes())
        self._map: mmap.mmap | None = None
        self.rows = torch.empty((num_slots, 0), dtype=torch.uint8)
        """Rows of the slab, uint8 (num_slots, block_bytes), page-aligned as a whole."""
        if self.num_bytes:
            self._map = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.rows = torch.frombuffer(self._map, dtype=torch.uint8).view(num_slots, block_bytes)
        self.note = ""
        """Reason why the memory could not be pinned; empty otherwise."""
        self._pinner = pinner
        self.is_pinned = pinner is not None and self._pin(pinner)

    @property
    def real_bytes(self) -> int:
        """Bytes of the mapping: the requested size, rounded up to whole pages."""
        return exact_bytes(self.num_bytes)

    def close(self) -> None:
        """Free the memory. No copy may be in progress."""
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
    """Return the bytes that a slab of `num_bytes` takes, in whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def torch_pinned_bytes(num_bytes: int) -> int:
    """Return the bytes that torch's caching host allocator takes for `num_bytes`: the next power of two
    (CachingHostAllocator.h).
    """
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0


def measured_torch_pinned_bytes(num_bytes: int) -> int | None:
    """Pin `num_bytes` with torch once and return the bytes that its allocator took; None without CUDA."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.init()  # type: ignore[no-untyped-call]  # without it torch counts nothing
    before = _pinned_bytes()
    tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    num_taken = _pinned_bytes() - before
    del tensor
    return num_taken


def _pinned_bytes() -> int:
    """Return torch's count of pinned bytes. The statistic does not exist before the first allocation."""
    return int(torch.cuda.host_memory_stats().get("active_bytes.current", 0))


def _check_free_memory(num_bytes: int, free: int) -> None:
    if num_bytes > free:
        raise BadInput(
            f"--kv-host-memory asks for {num_bytes / MIB:.0f} MiB of host memory: {free / MIB:.0f} MiB are free"
        )


def _clear_cuda_error() -> None:
    """Clear the pending CUDA error, which the next kernel launch would otherwise raise again."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _cuda_reason(error: Any) -> str:
    code = int(getattr(error, "value", error))
    return f"CUDA error {code}" if code else ""
