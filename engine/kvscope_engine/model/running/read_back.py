"""A step's results on their way down: pinned host memory, one copy that nobody waits for, and an event behind it.

Owns the host's memory for them. Two buffers take turns: the numbers of one step are read while those of the next come.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from kvscope_engine.model.running import step_buffer

NUM_BUFFERS: Final = 2
"""A step is read before the one after the next is handed over, or never."""
_BYTES_A_NUMBER: Final = 8


class Landing:
    """Numbers that have come, or are on their way."""

    def __init__(self, host: torch.Tensor, numbers: Any, event: torch.cuda.Event | None) -> None:
        self._host = host
        self._numbers = numbers
        self._event = event

    def numbers(self) -> list[Any]:
        """As Python's: the one place where a step waits for the device to tell it something."""
        if self._event is None:
            on_host: list[Any] = self._host.tolist()
            return on_host
        self._event.synchronize()
        landed: list[Any] = self._numbers.tolist()
        return landed


class ReadBack:
    """Brings one vector of int64 or float64 a step to the host."""

    def __init__(self, device: torch.device, num_numbers: int) -> None:
        self._is_host = device.type == "cpu"
        self._buffers = [] if self._is_host else [_Buffer(num_numbers) for _ in range(NUM_BUFFERS)]

    def start(self, vector: torch.Tensor) -> Landing:
        """`vector` starts to come down; what `start` gave before the last call must have been read."""
        if self._is_host:
            return Landing(vector, None, None)
        self._buffers.reverse()
        return self._buffers[0].start(vector)


class _Buffer:
    """Pinned memory for one step's numbers."""

    def __init__(self, num_numbers: int) -> None:
        self._room = 0
        self._grow(num_numbers)

    def start(self, vector: torch.Tensor) -> Landing:
        count = len(vector)
        if count > self._room:
            self._grow(count)
        kind = torch.float64 if vector.dtype == torch.float64 else torch.int64
        host = self._host.view(kind)[:count]
        host.copy_(vector, non_blocking=True)
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Landing(host, self._bytes.view("float64" if kind == torch.float64 else "int64")[:count], event)

    def _grow(self, num_numbers: int) -> None:
        self._room = num_numbers
        self._host, self._bytes = step_buffer.pinned_bytes(_BYTES_A_NUMBER * num_numbers)
