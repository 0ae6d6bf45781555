"""A step's data on their way up: a pinned host buffer, one copy to a device buffer of the same layout, views of it.

Owns the buffers and the order between them. The same shapes reserved in the same order lie at the same addresses,
which is what CUDA graphs are captured with. There is one on the device, which a step reads before the next one's copy,
and three on the host: one is written while the copies of the others may wait behind a step that runs, that of the next
one's inputs and that of how its tokens are sampled (`InFlight.sample`). On a CPU there is nothing to move: arrays are
the tensors.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT: Final = 64
"""Bytes: every array starts at a multiple, so that kernels find the same alignment in every step."""
NUM_SIDES: Final = 3
_DTYPES: Final = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class StepBuffer:
    """What a step needs of the host. `reserve` or `put` all of it, `send`, then use the tensors they gave."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._is_host = device.type == "cpu"
        self._device = device
        self._end = 0
        self._overflow: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_bytes = 0 if self._is_host else num_bytes
        if not self._is_host:
            self._sides = [_HostSide(num_bytes) for _ in range(NUM_SIDES)]
            self._on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    @property
    def is_on_device(self) -> bool:
        """Whether tensors lie somewhere that the host must wait to read."""
        return not self._is_host

    def begin(self) -> None:
        """Another copy; waits, if need be, until that before the last two has read the host's buffer."""
        self._end = 0
        if not self._is_host:
            self._sides.insert(0, self._sides.pop())
            self._sides[0].sent.wait()
            self._overflow.clear()

    def reserve(self, shape: tuple[int, ...], dtype: type[np.generic]) -> tuple[NDArray[Any], torch.Tensor]:
        """An array to be written before `send`, holding anything, and the tensor that has it after `send`."""
        if self._is_host:
            array = np.empty(shape, dtype)
            return array, torch.from_numpy(array)
        kind = np.dtype(dtype)
        start, size = self._end, int(np.prod(shape)) * kind.itemsize
        if start + size > self.num_bytes:
            return self._reserve_beyond(shape, kind)
        self._end = start + -(-size // ALIGNMENT) * ALIGNMENT
        array = self._sides[0].data[start : start + size].view(kind).reshape(shape)
        return array, self._on_device[start : start + size].view(_DTYPES[kind]).view(shape)

    def put(self, array: NDArray[Any]) -> torch.Tensor:
        """The tensor that has `array` after `send`."""
        if self._is_host:
            return torch.from_numpy(array)
        target, tensor = self.reserve(array.shape, array.dtype.type)
        target[...] = array
        return tensor

    def send(self) -> None:
        """One copy, which nobody waits for; one more for each array that the buffer had no room for."""
        if self._is_host or not (self._end or self._overflow):
            return
        if self._end:
            end = min(self._end, self.num_bytes)
            self._on_device[:end].copy_(self._sides[0].host[:end], non_blocking=True)
        for target, source in self._overflow:
            target.copy_(source, non_blocking=True)
        self._sides[0].sent.record()

    def _reserve_beyond(self, shape: tuple[int, ...], kind: np.dtype[Any]) -> tuple[NDArray[Any], torch.Tensor]:
        size = int(np.prod(shape)) * kind.itemsize
        host, data = pinned_bytes(size)
        on_device = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._overflow.append((on_device, host))
        return data.view(kind).reshape(shape), on_device.view(_DTYPES[kind]).view(shape)


class _HostSide:
    """Pinned memory, as a tensor and as an array, and when it was read last."""

    def __init__(self, num_bytes: int) -> None:
        self.host, self.data = pinned_bytes(num_bytes)
        self.sent = Sent()


class Sent:
    """When the device has read the host's buffer."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """A copy was handed to the current stream."""
        self._event.record()

    def wait(self) -> None:
        """Until the last one recorded is over."""
        self._event.synchronize()


def pinned_bytes(num_bytes: int) -> tuple[torch.Tensor, NDArray[np.uint8]]:
    """Page-locked memory, as a tensor and as an array."""
    tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return tensor, tensor.numpy()


def aligned_bytes(*sizes: int) -> int:
    """Bytes that arrays of these sizes take in a buffer."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
