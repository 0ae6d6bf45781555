"""The states of recurrent layers on the device: one tensor for each layer and part, one row a slot.

A request's state is what Mamba, linear attention and short convolutions keep in place of keys and values: as large
for one token as for a million, and overwritten by each. Owns the bytes; who has which slot, and why, it must not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvscope_kernels.copy_rows import RowTensors, row_tensors
from kvscope_telemetry.errors import KvscopeError

MIB = 1 << 20
MIN_SLOTS: Final = 2
"""A request's, and one to copy from while another begins."""
STATES_SHARE: Final = 0.5
"""Of the KV memory, that states may take."""
MAX_EMPTY_BLOCKS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a layer's state, as it is of a single request."""

    kind: str
    """`conv`, the last inputs of a convolution, or `recurrent`; other words where transformers has others."""
    index: int
    """Of several of a kind in one layer."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of one request."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


LayerState = tuple[StatePart, ...]
"""The state of one recurrent layer."""


def state_bytes(layers: Sequence[LayerState]) -> int:
    """Bytes of one slot: the state of one request over all recurrent layers."""
    return sum(part.num_bytes for layer in layers for part in layer)


def slots_and_blocks(room: int, one_block: int, one_state: int, wanted: int, longest: int) -> tuple[int, int]:
    """Slots for states, and blocks, in a KV memory of `room` bytes; no blocks where there is not enough of it.

    Slots for the states of `wanted` requests and prefixes, and one to copy from while another request begins, within
    half of it. Where no layer has keys and values it may be all: blocks are texts' places in the prefix cache,
    `longest` for a request of the greatest length, and take nothing.
    """
    share = STATES_SHARE if one_block else 1.0
    slots = max(MIN_SLOTS, min(wanted + 1, int(share * max(room, 0)) // one_state))
    left = room - slots * one_state
    if left < 0:
        return slots, 0
    return slots, left // one_block if one_block else min(longest * slots, MAX_EMPTY_BLOCKS)


class Slots:
    """Rows of a layer's tensors, in ascending order: those side by side are changed where they are, others are copied.

    On a CPU one by one: copies of whole states take half the time of torch's indexing.
    """

    def __init__(self, slots: Sequence[int], device: torch.device) -> None:
        self._slots = slots
        self._is_run = slots[-1] - slots[0] == len(slots) - 1
        self._indices = None if device.type == "cpu" else torch.tensor(slots, device=device)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """(num_slots, ...) -> (slots, ...), which may be changed until it is written."""
        if self._is_run:
            return tensor[self._slots[0] : self._slots[-1] + 1]
        if self._indices is not None:
            return tensor.index_select(0, self._indices)
        return torch.stack([tensor[slot] for slot in self._slots])

    def write(self, tensor: torch.Tensor, states: torch.Tensor) -> None:
        """What `read` gave."""
        if self._is_run:
            return
        if self._indices is not None:
            tensor.index_copy_(0, self._indices, states)
            return
        for slot, state in zip(self._slots, states, strict=True):
            tensor[slot].copy_(state)


class StateStorage:
    """States of `num_slots` requests. Raises KvscopeError with the sizes when the device has no room for them."""

    def __init__(self, num_slots: int, layers: Sequence[LayerState], device: torch.device) -> None:
        self.num_slots = num_slots
        self.layers = tuple(layers)
        self.device = device
        self.slot_bytes = state_bytes(layers)
        try:
            self._tensors = [
                [torch.zeros((num_slots, *part.shape), dtype=part.dtype, device=device) for part in layer]
                for layer in self.layers
            ]
        except (RuntimeError, MemoryError) as error:  # torch tells of memory by RuntimeError
            raise KvscopeError(
                f"no memory for the states of recurrent layers: {num_slots} of {self.slot_bytes / MIB:.2f} MiB are"
                f" {self.num_bytes / MIB:.0f} MiB on {device} ({str(error).splitlines()[0]:.120});"
                " give a smaller --max-num-seqs or --state-checkpoints"
            ) from error
        self._rows: RowTensors | None = row_tensors(self.slot_tensors) if num_slots else None

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return self.num_slots * self.slot_bytes

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """All that a slot is made of: tensors whose row s holds bytes of slot s."""
        return tuple(tensor.flatten(1) for layer in self._tensors for tensor in layer)

    @property
    def rows(self) -> RowTensors:
        """The same, as copies between slots find them."""
        assert self._rows is not None, "the storage is closed, or has no slots"
        return self._rows

    def layer(self, layer: int) -> Sequence[torch.Tensor]:
        """The parts of a recurrent layer's state, each (num_slots, ...)."""
        return self._tensors[layer]

    def close(self) -> None:
        """Give the memory back; the storage holds nothing afterwards."""
        self._rows = None
        self._tensors.clear()
