"""Copies a step's results to pinned host memory asynchronously.

Owns the memory and the events that signal arrival. Must not depend on the meaning of the results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.device_memory import step_buffer

NUM_BUFFERS: Final = 2
"""Number of host buffers for results. Two suffice, because a step's results are read before the second step
after it is launched, or not at all.
"""
_NUMBER_BYTES: Final = 8
_FLOAT_BYTES: Final = 4

Rows = Callable[[], NDArray[np.float32]]
"""Function that waits until a step's rows have arrived on the host, and returns them."""
Wait = Callable[[torch.cuda.Event], None]
"""Function that waits until the device has reached an event."""


def synchronize(event: torch.cuda.Event) -> None:
    event.synchronize()


class RowReadBack:
    """Copies float32 rows of selected steps to the host on a separate stream.

    Neither the next step nor this step's tokens wait for the copy. Two buffers alternate: the rows of one step are read
    while those of the next arrive.
    """

    def __init__(self, device: torch.device, num_numbers: int, wait: Wait = synchronize) -> None:
        """Create without buffers; the first `start` allocates them, for `num_numbers` float32 elements each."""
        self._device = device
        self._num_numbers = num_numbers
        self._wait = wait
        self._buffers: list[PinnedBuffer] = []
        self._stream: Any = None

    def start(self, rows: torch.Tensor) -> Rows:
        """Start copying `rows`, of any shape, once the work enqueued so far is done. Later work may overwrite them."""
        if self._device.type == "cpu":
            return lambda: rows.numpy().copy()
        if not self._buffers:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._buffers = [PinnedBuffer(-(-self._num_numbers // 2), self._wait) for _ in range(NUM_BUFFERS)]
        packed = rows.clone(memory_format=torch.contiguous_format)
        self._stream.wait_event(_recorded_event())
        self._buffers.reverse()
        with torch.cuda.stream(self._stream):
            return self._buffers[0].start_rows(packed)


class PendingVector:
    """A vector on the host, possibly still being copied."""

    def __init__(self, numbers: Any, event: torch.cuda.Event | None = None, wait: Wait = synchronize) -> None:
        self._numbers = numbers
        self._event = event
        self._wait = wait

    def wait(self) -> list[Any]:
        """Wait for the copy and return the elements as Python objects. This is where a step waits for the device."""
        if self._event is not None:
            self._wait(self._event)
        numbers: list[Any] = self._numbers.tolist()
        return numbers


class VectorReadBack:
    """Copies one vector of int64 or float64 per step to pinned host memory, asynchronously.

    Two buffers alternate: the vector of one step is read while that of the next arrives.
    """

    def __init__(self, device: torch.device, num_numbers: int, wait: Wait = synchronize) -> None:
        self._is_host = device.type == "cpu"
        self._wait = wait
        self._buffers = [] if self._is_host else [PinnedBuffer(num_numbers, wait) for _ in range(NUM_BUFFERS)]

    def start(self, vector: torch.Tensor) -> PendingVector:
        """Start copying `vector` to the host. The result of the call before the previous one must have been
        read, because this call reuses its buffer.
        """
        if self._is_host:
            return PendingVector(vector)
        self._buffers.reverse()
        return PendingVector(*self._buffers[0].start(vector), self._wait)


class PinnedBuffer:
    """Pinned host memory to which the results of one step are copied."""

    def __init__(self, num_numbers: int, wait: Wait) -> None:
        self._wait = wait
        self._capacity = 0
        self._grow(num_numbers)

    def start(self, vector: torch.Tensor) -> tuple[Any, torch.cuda.Event]:
        """Start copying `vector`, int64 or float64. Returns it as a NumPy array and the event at which it is valid."""
        count = len(vector)
        if count > self._capacity:
            self._grow(count)
        dtype = torch.float64 if vector.dtype == torch.float64 else torch.int64
        self._host.view(dtype)[:count].copy_(vector, non_blocking=True)
        return self._bytes.view("float64" if dtype == torch.float64 else "int64")[:count], _recorded_event()

    def start_rows(self, rows: torch.Tensor) -> Rows:
        """Start copying `rows`, which must be contiguous. They are kept alive until they have arrived."""
        count = rows.numel()
        if count * _FLOAT_BYTES > self._capacity * _NUMBER_BYTES:
            self._grow(-(-count * _FLOAT_BYTES // _NUMBER_BYTES))
        self._host.view(torch.float32)[:count].copy_(rows.view(-1), non_blocking=True)
        event, numbers = _recorded_event(), self._bytes.view("float32")[:count]

        def wait_for_rows() -> NDArray[np.float32]:
            self._wait(event)
            return numbers.reshape(rows.shape).copy()

        return wait_for_rows

    def _grow(self, num_numbers: int) -> None:
        self._capacity = num_numbers
        self._host, self._bytes = step_buffer.pinned_bytes(_NUMBER_BYTES * num_numbers)


def _recorded_event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
