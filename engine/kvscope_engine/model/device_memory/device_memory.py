"""Queries a device's memory: its size, its free bytes, the bytes of this process and their peak, and the bytes that
other processes hold or have planned to allocate.

The queries are behind a protocol, so that tests can simulate a start on a device that is not present. Must not depend
on the model.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kvscope_engine.model.device_memory.gpu_holders import GpuHolders, is_drawing
from kvscope_engine.model.device_memory.gpu_register import promised_bytes
from kvscope_engine.model.platforms.device import free_bytes, gpu_uuid
from kvscope_kernels.launch import compute_capability, num_multiprocessors


class DeviceMemory(Protocol):
    @property
    def total_bytes(self) -> int: ...

    @property
    def num_multiprocessors(self) -> int:
        """Number of streaming multiprocessors, which determines into how many splits attention is divided."""

    @property
    def compute_capability(self) -> int:
        """Compute capability times 10 (90 for 9.0), which determines the size of attention's tiles."""

    def free_bytes(self) -> int:
        """Return the bytes that any process can allocate now. Memory cached by torch's allocator is not free."""

    def held_bytes(self) -> int:
        """Return the bytes allocated by this process's tensors."""

    def reset_peak(self) -> None: ...

    def peak_bytes(self) -> int:
        """Return the maximum of `held_bytes` since `reset_peak`."""

    def empty_cache(self) -> None:
        """Give cached memory that no tensor uses back to the driver."""

    def reserved_bytes(self) -> int:
        """Return the bytes that torch's allocator holds, in tensors or cached."""

    def promised_bytes(self) -> int:
        """Return the bytes that other engines on the GPU have planned for and not allocated yet."""

    def draws_display(self) -> bool:
        """Whether the GPU draws a display. Windows on the display use the GPU's memory and may need more later."""

    @property
    def holders(self) -> GpuHolders:
        """Other processes that hold memory of the GPU."""


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uuid = gpu_uuid(device)
        self._holders = GpuHolders(self._uuid)

    @property
    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    @property
    def num_multiprocessors(self) -> int:
        return num_multiprocessors(self._device)

    @property
    def compute_capability(self) -> int:
        return compute_capability(self._device)

    def free_bytes(self) -> int:
        return free_bytes(self._device)

    def held_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def reserved_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))

    def promised_bytes(self) -> int:
        return promised_bytes(self._uuid)

    def draws_display(self) -> bool:
        """Whether the driver reports that the GPU draws a display. If the driver reports nothing about
        displays, a GPU under WSL is assumed to draw one.
        """
        return is_drawing(self._holders.draws_display())

    @property
    def holders(self) -> GpuHolders:
        return self._holders
