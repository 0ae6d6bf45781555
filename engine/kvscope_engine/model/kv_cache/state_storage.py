"""Stores the states of recurrent layers. On the device, each layer's `StatePart` is a tensor with one row per slot; in
host memory, a slot holds a whole state.

A request's state is what Mamba, linear attention and short convolutions store instead of keys and values: its size does
not depend on the number of tokens, and each token overwrites it. Owns the bytes; must not depend on requests or policy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvscope_engine.model.device_memory.host_slab import CudaPinner, HostSlab
from kvscope_kernels.copy_rows import RowTensors, row_tensors
from kvscope_telemetry.errors import KvscopeError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StatePart:
    """Shape and kind of one tensor in a layer's state of a single request."""

    kind: str
    """`conv` (last inputs of a convolution), `recurrent`, or another name that transformers uses for the state."""
    index: int
    """Index among the parts of the same kind in one layer."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


LayerState = tuple[StatePart, ...]


def state_bytes(layers: Sequence[LayerState]) -> int:
    """Return the bytes of one slot: the state of one request over all recurrent layers."""
    return sum(part.num_bytes for layer in layers for part in layer)


class StateSlots:
    """Slots of one step, ascending, in a layer's state tensors. Consecutive slots are read and written as views, others
    are copied.

    On a CPU, slots are copied in a loop, which takes half the time of torch's indexing for whole states.
    """

    def __init__(self, slots: Sequence[int], device: torch.device) -> None:
        self._slots = slots
        self._is_contiguous = slots[-1] - slots[0] == len(slots) - 1
        self._indices = None if device.type == "cpu" else torch.tensor(slots, device=device)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the states in the slots, (slots, ...), of `tensor`, (num_slots, ...). They may be modified until
        `write`.
        """
        if self._is_contiguous:
            return tensor[self._slots[0] : self._slots[-1] + 1]
        if self._indices is not None:
            return tensor.index_select(0, self._indices)
        return torch.stack([tensor[slot] for slot in self._slots])

    def write(self, tensor: torch.Tensor, states: torch.Tensor) -> None:
        """Store states that `read` returned, after they were modified."""
        if self._is_contiguous:
            return
        if self._indices is not None:
            tensor.index_copy_(0, self._indices, states)
            return
        for slot, state in zip(self._slots, states, strict=True):
            tensor[slot].copy_(state)


class StateStorage:
    """States of `num_slots` requests on the device, and of `num_host_slots` in host memory, pinned if the device is a
    GPU.

    Host slots have indices from `num_slots`. With `has_pad`, the device has one additional slot that belongs to no
    request.

    Raises KvscopeError with the sizes if memory is missing.
    """

    def __init__(
        self,
        num_slots: int,
        layers: Sequence[LayerState],
        device: torch.device,
        num_host_slots: int = 0,
        *,
        has_pad: bool = False,
    ) -> None:
        self.num_slots = num_slots
        self.num_host_slots = num_host_slots
        self._has_pad = has_pad
        self.layers = tuple(layers)
        self.device = device
        self.slot_bytes = state_bytes(layers)
        try:
            self._tensors = [
                [torch.zeros((num_slots + has_pad, *part.shape), dtype=part.dtype, device=device) for part in layer]
                for layer in self.layers
            ]
        except (RuntimeError, MemoryError) as error:  # torch reports a lack of memory as RuntimeError
            raise KvscopeError(
                f"no memory for the states of recurrent layers: {num_slots} of {self.slot_bytes / MIB:.2f} MiB are"
                f" {self.num_bytes / MIB:.0f} MiB on {device} ({str(error).splitlines()[0]:.120});"
                " give a smaller --max-num-seqs or --state-checkpoints"
            ) from error
        self._rows: RowTensors | None = row_tensors(self.slot_tensors) if num_slots else None
        self._host: HostSlab | None = None
        self.copy_seconds = 0.0
        """Seconds that a copy of a state to or from host memory takes, as measured at the start."""
        if num_host_slots:
            self._host = HostSlab(num_host_slots, self.slot_bytes, CudaPinner() if device.type == "cuda" else None)
            self.copy_seconds = self._measure_copy_seconds()

    @property
    def pad_slot(self) -> int:
        """Slot of the sequences that pad a CUDA graph. It belongs to no request."""
        assert self._has_pad, "no graphs are captured"
        return self.num_slots

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots on the device."""
        return (self.num_slots + self._has_pad) * self.slot_bytes

    @property
    def host_bytes(self) -> int:
        return self.num_host_slots * self.slot_bytes

    @property
    def note(self) -> str:
        """Why host memory could not be pinned; empty otherwise."""
        return self._host.note if self._host is not None else ""

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that slots consist of. Row s of each belongs to slot s."""
        return tuple(tensor.flatten(1) for layer in self._tensors for tensor in layer)

    @property
    def rows(self) -> RowTensors:
        """`slot_tensors` in the form that copies between slots use."""
        assert self._rows is not None, "the storage is closed, or has no slots"
        return self._rows

    def copy(self, pairs: Sequence[tuple[int, int]], copy_rows: Callable[[RowTensors, torch.Tensor], None]) -> None:
        """Copy slots, given as (source, target), in order on the stream of the step. `copy_rows` is the device's
        operation.

        If memory for a batched copy is missing, the slots of the batch are copied individually. The call cannot fail
        and be repeated instead, because slots copied before the failure would be copied again from changed sources.
        """
        batch: list[tuple[int, int]] = []
        for source, target in (*pairs, (-1, -1)):
            is_on_device = 0 <= max(source, target) < self.num_slots
            batch_slots = {slot for pair in batch for slot in pair}
            if batch and not (is_on_device and target not in batch_slots and source not in {to for _, to in batch}):
                try:
                    copy_rows(self.rows, torch.tensor(batch, device=self.device))
                except (RuntimeError, MemoryError):
                    self._copy_each(batch)
                batch.clear()
            if is_on_device:
                batch.append((source, target))
            elif source >= 0:
                self._copy_with_host(source, target)

    def layer(self, layer: int) -> Sequence[torch.Tensor]:
        """Return the tensors of a recurrent layer's state, one per `StatePart`, each (num_slots, ...)."""
        return self._tensors[layer]

    def close(self) -> None:
        self._rows = None
        self._tensors.clear()
        if self._host is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._host.close()

    def _copy_each(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            for tensor in self.slot_tensors:
                tensor[target].copy_(tensor[source])

    def _copy_with_host(self, source: int, target: int) -> None:
        assert self._host is not None, "there are no states in host memory"
        device_slot, host_row = min(source, target), max(source, target) - self.num_slots
        start, row = 0, self._host.rows[host_row]
        for tensor in self.slot_tensors:
            device_part = tensor[device_slot].view(torch.uint8)
            host_part = row[start : start + len(device_part)]
            if target == device_slot:
                device_part.copy_(host_part, non_blocking=True)
            else:
                host_part.copy_(device_part, non_blocking=True)
            start += len(device_part)

    def _measure_copy_seconds(self) -> float:
        """Return the seconds of one copy to host memory or back. The best of three copies counts, since the first has
        one-time costs.
        """
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            self._copy_with_host(0, self.num_slots)
            self._copy_with_host(self.num_slots, 0)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds.append((time.perf_counter() - started) / 2)
        return min(seconds)
