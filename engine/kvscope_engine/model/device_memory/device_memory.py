"""Reads a device's memory: its size, what is free, what we hold, our peak, and who else wants of it.

Owns these queries, so that a start can be rehearsed with the answers of a device that is not there. Knows no model.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kvscope_engine.model.device_memory.gpu_holders import GpuHolders, is_drawing
from kvscope_engine.model.device_memory.gpu_register import promised_bytes
from kvscope_engine.model.platforms.device import free_bytes, gpu_uuid
from kvscope_kernels.launch import compute_capability, num_multiprocessors


class DeviceMemory(Protocol):
    """A GPU's memory, as an engine on it sees it."""

    @property
    def total_bytes(self) -> int:
        """Of the whole device."""

    @property
    def num_multiprocessors(self) -> int:
        """What a kernel is spread over: how far attention is split hangs on it."""

    @property
    def compute_capability(self) -> int:
        """90 for 9.0; how large its pieces are hangs on it."""

    def free_bytes(self) -> int:
        """That anybody can take now; what torch keeps for us is not free."""

    def held_bytes(self) -> int:
        """Taken by our tensors."""

    def restart_peak(self) -> None:
        """Forget what was held at most so far."""

    def peak_bytes(self) -> int:
        """Held at most since then."""

    def release_unused(self) -> None:
        """Give back what torch keeps for us and no tensor uses."""

    def reserved_bytes(self) -> int:
        """That torch keeps for us, in tensors or not."""

    def promised_bytes(self) -> int:
        """That other engines on it planned for and have not taken yet."""

    def draws_display(self) -> bool:
        """Whether windows have memory of it, and will want more."""

    @property
    def holders(self) -> GpuHolders:
        """Who else has memory of it."""


class CudaMemory:
    """A CUDA device, by torch's allocator and the driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uuid = gpu_uuid(device)
        self._holders = GpuHolders(self._uuid)

    @property
    def total_bytes(self) -> int:
        """Of the whole device."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    @property
    def num_multiprocessors(self) -> int:
        """By the driver."""
        return num_multiprocessors(self._device)

    @property
    def compute_capability(self) -> int:
        """By the driver."""
        return compute_capability(self._device)

    def free_bytes(self) -> int:
        """By the driver."""
        return free_bytes(self._device)

    def held_bytes(self) -> int:
        """By torch's count."""
        return int(torch.cuda.memory_allocated(self._device))

    def restart_peak(self) -> None:
        """Forget what was held at most so far."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """By torch's count."""
        return int(torch.cuda.max_memory_allocated(self._device))

    def release_unused(self) -> None:
        """Give cached segments back to the driver."""
        torch.cuda.empty_cache()

    def reserved_bytes(self) -> int:
        """By torch's count."""
        return int(torch.cuda.memory_reserved(self._device))

    def promised_bytes(self) -> int:
        """By what they wrote down."""
        return promised_bytes(self._uuid)

    def draws_display(self) -> bool:
        """By the driver; where it does not tell, a GPU of Windows does."""
        return is_drawing(self._holders.draws_display())

    @property
    def holders(self) -> GpuHolders:
        """By the driver."""
        return self._holders
