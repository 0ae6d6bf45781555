"""Copies a step's results to pinned host memory asynchronously.

Owns the memory and the events that signal arrival. Must not know what the results mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.device_memory import step_buffer

NUM_BUFFERS: Final = 2
"""Number of buffers for results. A step's results are read before the step after the next is launched, or never."""
_BYTES_A_NUMBER: Final = 8
_FLOAT_BYTES: Final = 4

Rows = Callable[[], NDArray[np.float32]]
"""Waits for some of a step's rows and returns them."""
Wait = Callable[[torch.cuda.Event], None]
"""Returns once the device has reached an event."""


def synchronize(event: torch.cuda.Event) -> None:
    event.synchronize()


class RowsBack:
    """Copies float32 rows of some steps to the host on its own stream.

    Neither the next step nor this step's tokens wait for the copy. Two buffers alternate: the rows of one step are read
    while those of the next arrive.
    """

    def __init__(self, device: torch.device, num_numbers: int, wait: Wait = synchronize) -> None:
        """Create without buffers. Memory for `num_numbers` numbers is allocated by the first `start`."""
        self._device = device
        self._num_numbers = num_numbers
        self._wait = wait
        self._buffers: list[Pinned] = []
        self._stream: Any = None

    def start(self, rows: torch.Tensor) -> Rows:
        """Start copying `rows`, of any shape, after the work enqueued so far. They may be overwritten by later work."""
        if self._device.type == "cpu":
            return lambda: rows.numpy().copy()
        if not self._buffers:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._buffers = [Pinned(-(-self._num_numbers // 2), self._wait) for _ in range(NUM_BUFFERS)]
        packed = rows.clone(memory_format=torch.contiguous_format)
        self._stream.wait_event(_moment())
        self._buffers.reverse()
        with torch.cuda.stream(self._stream):
            return self._buffers[0].start_rows(packed)


class Pinned:
    """Pinned memory for the numbers of one step."""

    def __init__(self, num_numbers: int, wait: Wait) -> None:
        self._wait = wait
        self._room = 0
        self._grow(num_numbers)

    def start(self, vector: torch.Tensor) -> tuple[Any, torch.cuda.Event]:
        """Start copying `vector`, int64 or float64. Returns it as a NumPy array and the event at which it is valid."""
        count = len(vector)
        if count > self._room:
            self._grow(count)
        kind = torch.float64 if vector.dtype == torch.float64 else torch.int64
        self._host.view(kind)[:count].copy_(vector, non_blocking=True)
        return self._bytes.view("float64" if kind == torch.float64 else "int64")[:count], _moment()

    def start_rows(self, rows: torch.Tensor) -> Rows:
        """Start copying `rows`, which must be contiguous and are kept alive until they have arrived."""
        count = rows.numel()
        if count * _FLOAT_BYTES > self._room * _BYTES_A_NUMBER:
            self._grow(-(-count * _FLOAT_BYTES // _BYTES_A_NUMBER))
        self._host.view(torch.float32)[:count].copy_(rows.view(-1), non_blocking=True)
        event, numbers = _moment(), self._bytes.view("float32")[:count]

        def landed() -> NDArray[np.float32]:
            self._wait(event)
            return numbers.reshape(rows.shape).copy()

        return landed

    def _grow(self, num_numbers: int) -> None:
        self._room = num_numbers
        self._host, self._bytes = step_buffer.pinned_bytes(_BYTES_A_NUMBER * num_numbers)


def _moment() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
