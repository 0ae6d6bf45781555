"""Linear layer with the deltas of LoRA adapters: y = W x + B A x, for the batch rows that use an adapter.

Owns the stacks of A and B, with a slot per adapter, and computes the sum. `lora_adapters` assigns slots to adapters and
rows. A fused layer (q, k and v, or gate and up, in one matmul) has a delta for each of its original layers, added to
the output columns of that layer. In steps without adapters, the only cost is reading one attribute.

One matmul computes the results of all of the step's slots for each row, and those of slots that the row does not use
are set to zero. The number of operations thus does not depend on the adapters, and A and B are not copied per row.
Source of the batching: Chen et al., Punica: Multi-tenant LoRA serving, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvscope_engine.model.layers.lora.peft_folder import Delta
from kvscope_engine.model.layers.recurrent.recurrent_layers import CallRows


@dataclass(frozen=True, slots=True)
class StepSlots:
    """Adapter slots that are computed in a step: `first` to `stop` (exclusive), for all rows of the step."""

    first: int
    stop: int
    others: torch.Tensor | None
    """Shape (T, stop - first), bool: True for slots that the row does not use. The results of these slots are set to
    zero.

    None if there is a single slot, which all rows use.
    """

    def of_rows(self, rows: slice | torch.Tensor | None) -> StepSlots:
        """Return the slots of the given batch rows, in that order; of all rows if `rows` is None."""
        if rows is None or self.others is None:
            return self
        return StepSlots(self.first, self.stop, self.others[rows])


class LoraStepState:
    """State of the running step that the LoRA layers of a model share.

    `slots` is None if no row has an adapter. `call_rows` are the batch rows that a recurrent layer is currently
    processing: those of one sequence, or one row each of several decodes.
    """

    def __init__(self, call_rows: CallRows) -> None:
        self.slots: StepSlots | None = None
        self.call_rows = call_rows


@dataclass(frozen=True, slots=True)
class OutputSlice:
    """Output columns of a (possibly fused) layer that correspond to one linear layer of the original model."""

    name: str
    start: int
    size: int


class LoraStack(nn.Module):
    """Matrices A and B of one (possibly fused) layer for all adapter slots. They are zero if an adapter has no
    delta.
    """

    a: torch.Tensor
    """Shape (slots, parts, rank, inputs)."""

    def __init__(
        self, parts: Sequence[OutputSlice], num_inputs: int, num_slots: int, max_rank: int, like: torch.Tensor
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.rank = max_rank
        self.filled = [False] * num_slots
        """Whether each slot contains nonzero weights."""
        shape = (num_slots, len(parts), max_rank, num_inputs)
        self.register_buffer("a", like.new_zeros(shape), persistent=False)
        for number, part in enumerate(parts):
            self.register_buffer(f"b{number}", like.new_zeros(num_slots, max_rank, part.size), persistent=False)

    def b(self, number: int) -> torch.Tensor:
        """Return B of the original layer at index `number` of `parts`, transposed: (slots, rank, outputs)."""
        return self._buffers[f"b{number}"]  # type: ignore[return-value]

    def fill(self, slot: int, deltas: Sequence[Delta | None]) -> None:
        """Replace the contents of a slot with an adapter's deltas, one per original layer in `parts`."""
        is_filled = any(delta is not None for delta in deltas)
        if not (is_filled or self.filled[slot]):
            return
        self.filled[slot] = True  # in case a copy below fails
        self.a[slot].zero_()
        for number, delta in enumerate(deltas):
            b = self.b(number)[slot].zero_()
            if delta is not None:
                rank = len(delta.a)
                self.a[slot, number, :rank].copy_(delta.a)
                b[:rank].copy_(delta.b.t())
        self.filled[slot] = is_filled

    def add_deltas(self, y: torch.Tensor, x: torch.Tensor, step: StepSlots) -> None:
        """Add the deltas for x (T, inputs) to y (T, outputs), in place."""
        low, high = step.first, step.stop
        if not any(self.filled[low:high]):
            return
        count, num_parts = high - low, len(self.parts)
        inner = (x @ self.a[low:high].flatten(0, 2).t()).view(-1, count, num_parts, self.rank)
        if step.others is not None:
            inner.masked_fill_(step.others[:, :, None, None], 0.0)
        for number, part in enumerate(self.parts):
            part_inner = inner[:, :, number].reshape(-1, count * self.rank)
            y[:, part.start : part.start + part.size].addmm_(part_inner, self.b(number)[low:high].flatten(0, 1))


class LoraLinear(nn.Module):
    """Wraps a linear layer of any class, with the same call signature, and adds the deltas of adapters."""

    def __init__(self, linear: Any, stack: LoraStack, step_state: LoraStepState) -> None:
        super().__init__()
        self.linear = linear
        self.lora_stack = stack
        self.out_features, self.in_features = linear.weight.shape
        self.fuses_add = bool(getattr(linear, "fuses_add", False))
        self.was_called = False
        """Whether the layer has been called in a step with an adapter."""
        self._step_state = step_state

    @property
    def weight(self) -> torch.Tensor:
        """Weight of the wrapped layer, possibly a `ReleasedWeight`."""
        return self.linear.weight  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        step = self._step_state.slots
        if step is not None:
            self.was_called = True
            step = step.of_rows(self._step_state.call_rows.rows)
            self.lora_stack.add_deltas(y.view(-1, self.out_features), x.reshape(-1, self.in_features), step)
        return y

    def forward_add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if self._step_state.slots is None:
            return self.linear.forward_add(x, other)  # type: ignore[no-any-return]
        return other + self.forward(x)
