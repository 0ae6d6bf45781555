"""A step's results on their way down: into pinned memory, by copies that no step waits for.

Owns the memory and the events by which it is known that they are here; what they mean it must not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.device_memory import step_buffer

NUM_BUFFERS: Final = 2
"""For results on their way down: a step is read before the one after the next is handed over, or never."""
_BYTES_A_NUMBER: Final = 8
_FLOAT_BYTES: Final = 4

Rows = Callable[[], NDArray[np.float32]]
"""Some of a step's, once they are here; waits for them."""
Wait = Callable[[torch.cuda.Event], None]
"""Returns once the device has come to an event."""


def synchronize(event: torch.cuda.Event) -> None:
    """Wait for it, whatever else comes."""
    event.synchronize()


class RowsBack:
    """Brings rows of float32 of some steps, in a stream of its own: neither the next step nor the tokens of this one
    wait for the copy. Two buffers take turns: the rows of one step are read while those of the next come."""

    def __init__(self, device: torch.device, num_numbers: int, wait: Wait = synchronize) -> None:
        """Memory for so many is taken with the first of them."""
        self._device = device
        self._num_numbers = num_numbers
        self._wait = wait
        self._buffers: list[Pinned] = []
        self._stream: Any = None

    def start(self, rows: torch.Tensor) -> Rows:
        """`rows`, of any shape, start to come down as the device's work stands; they may be written to after that."""
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
    """Pinned memory for one step's numbers."""

    def __init__(self, num_numbers: int, wait: Wait) -> None:
        self._wait = wait
        self._room = 0
        self._grow(num_numbers)

    def start(self, vector: torch.Tensor) -> tuple[Any, torch.cuda.Event]:
        """The numbers of `vector`, int64 or float64, as NumPy's, and when they are here."""
        count = len(vector)
        if count > self._room:
            self._grow(count)
        kind = torch.float64 if vector.dtype == torch.float64 else torch.int64
        self._host.view(kind)[:count].copy_(vector, non_blocking=True)
        return self._bytes.view("float64" if kind == torch.float64 else "int64")[:count], _moment()

    def start_rows(self, rows: torch.Tensor) -> Rows:
        """`rows` contiguous; they are kept until they are here."""
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
    """Now, in the stream that is current."""
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
