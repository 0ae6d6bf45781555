"""Uploads a step's input arrays: pinned host buffers, one copy to a device buffer of the same layout, and views of it.

Owns the buffers and their synchronization. The same shapes reserved in the same order have the same addresses, as CUDA
graphs require. The device has one buffer, which a step reads before the next step's copy overwrites it. The host has
three: one is written while two copies may still be queued behind a running step, that of the next step's inputs and
that of its sampling inputs (`InFlightStep.sample`). On a CPU nothing is copied: tensors share the arrays' memory.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT: Final = 64
"""Alignment of every array in bytes. It is the same in every step, so that Triton does not recompile kernels."""
NUM_HOST_BUFFERS: Final = 3
_DTYPES: Final = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class StepBuffer:
    """Input buffer of a step. Call `begin`, then `reserve` or `put` for each array, then `send`. The tensors are valid
    after `send`.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._is_host = device.type == "cpu"
        self.device = device
        self._end = 0
        self._overflow: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_bytes = 0 if self._is_host else num_bytes
        if not self._is_host:
            self._host_buffers = [_HostBuffer(num_bytes) for _ in range(NUM_HOST_BUFFERS)]
            self._on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    @property
    def is_on_device(self) -> bool:
        """Whether the tensors are in device memory, so that reading them on the host would wait for the device."""
        return not self._is_host

    def begin(self) -> None:
        """Start a new upload, after waiting until the device has read the host buffer that this upload reuses."""
        self._end = 0
        if not self._is_host:
            self._host_buffers.insert(0, self._host_buffers.pop())
            self._host_buffers[0].sent.wait()
            self._overflow.clear()

    def reserve(self, shape: tuple[int, ...], dtype: type[np.generic]) -> tuple[NDArray[Any], torch.Tensor]:
        """Return an uninitialized array to be written before `send`, and the tensor with its contents after `send`."""
        if self._is_host:
            array = np.empty(shape, dtype)
            return array, torch.from_numpy(array)
        numpy_dtype = np.dtype(dtype)
        start, size = self._end, int(np.prod(shape)) * numpy_dtype.itemsize
        if start + size > self.num_bytes:
            return self._reserve_overflow(shape, numpy_dtype)
        self._end = start + -(-size // ALIGNMENT) * ALIGNMENT
        array = self._host_buffers[0].data[start : start + size].view(numpy_dtype).reshape(shape)
        return array, self._on_device[start : start + size].view(_DTYPES[numpy_dtype]).view(shape)

    def put(self, array: NDArray[Any]) -> torch.Tensor:
        """Copy `array` to the buffer and return the tensor with its contents after `send`."""
        if self._is_host:
            return torch.from_numpy(array)
        target, tensor = self.reserve(array.shape, array.dtype.type)
        target[...] = array
        return tensor

    def send(self) -> None:
        """Start one asynchronous copy of the buffer, and one of each array that did not fit into it."""
        if self._is_host or not (self._end or self._overflow):
            return
        if self._end:
            end = min(self._end, self.num_bytes)
            self._on_device[:end].copy_(self._host_buffers[0].host[:end], non_blocking=True)
        for target, source in self._overflow:
            target.copy_(source, non_blocking=True)
        self._host_buffers[0].sent.record()

    def _reserve_overflow(
        self, shape: tuple[int, ...], numpy_dtype: np.dtype[Any]
    ) -> tuple[NDArray[Any], torch.Tensor]:
        size = int(np.prod(shape)) * numpy_dtype.itemsize
        host, data = pinned_bytes(size)
        on_device = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._overflow.append((on_device, host))
        return data.view(numpy_dtype).reshape(shape), on_device.view(_DTYPES[numpy_dtype]).view(shape)


class _HostBuffer:
    def __init__(self, num_bytes: int) -> None:
        self.host, self.data = pinned_bytes(num_bytes)
        self.sent = UploadEvent()


class UploadEvent:
    """Event at which the device has read a host buffer."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


def pinned_bytes(num_bytes: int) -> tuple[torch.Tensor, NDArray[np.uint8]]:
    """Allocate page-locked memory and return it as a tensor and as an array over the same bytes."""
    tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return tensor, tensor.numpy()


def aligned_bytes(*sizes: int) -> int:
    """Return the bytes of a buffer for arrays of these sizes in bytes."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
