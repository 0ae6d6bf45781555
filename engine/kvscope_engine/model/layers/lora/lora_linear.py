"""A linear layer with the deltas of LoRA adapters beside it: y = W x, and B A x for the rows that ask for them.

Owns the stacks of A and B, a slot an adapter, and the sum. Which adapter has which slot, and which rows ask for it, is
for `adapters`. What is fused before (q, k and v, or gate and up, in one product) has a delta for each of its parts,
added to its own columns. Without adapters in the step only one attribute is looked at.

All slots of a step are computed in one product, with a row's own kept and the others' set to zero: as many operations
whatever the adapters, and no copies of A and B by row. Source of the batching: Chen et al., Punica: Multi-tenant LoRA
serving, 2023.
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
    """Which slots the rows of a step ask for."""

    first: int
    stop: int
    """Slots from `first` on that are computed; this one is not."""
    others: torch.Tensor | None
    """(T, slots), whether a slot is not a row's own; None: there is one, and all rows ask for it."""

    def of_rows(self, rows: slice | torch.Tensor | None) -> StepSlots:
        """Return the same for some rows of the step, in that order; None: for all of them as they are."""
        if rows is None or self.others is None:
            return self
        return StepSlots(self.first, self.stop, self.others[rows])


class InStep:
    """What the layers of a model know of the running step.

    `slots` is None if no row has an adapter; `call_rows` are the rows that the running recurrent layer is called with:
    it runs its sequences apart from each other, or decodes in the order of their states.
    """

    def __init__(self, call_rows: CallRows) -> None:
        self.slots: StepSlots | None = None
        self.call_rows = call_rows


@dataclass(frozen=True, slots=True)
class OutputSlice:
    """Columns of a layer's output that are a linear layer of the model as it came."""

    name: str
    start: int
    size: int


class LoraStack(nn.Module):
    """A and B of one layer, by slot. Numbers that no adapter has are 0."""

    a: torch.Tensor
    """(slots, parts, rank, inputs)."""

    def __init__(
        self, parts: Sequence[OutputSlice], num_inputs: int, num_slots: int, max_rank: int, like: torch.Tensor
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.rank = max_rank
        self.filled = [False] * num_slots
        """Slots with numbers other than 0."""
        shape = (num_slots, len(parts), max_rank, num_inputs)
        self.register_buffer("a", like.new_zeros(shape), persistent=False)
        for number, part in enumerate(parts):
            self.register_buffer(f"b{number}", like.new_zeros(num_slots, max_rank, part.size), persistent=False)

    def b(self, number: int) -> torch.Tensor:
        """(slots, rank, outputs) of a part."""
        return self._buffers[f"b{number}"]  # type: ignore[return-value]

    def fill(self, slot: int, deltas: Sequence[Delta | None]) -> None:
        """Put an adapter's deltas, one a part, in the place of whatever the slot held."""
        is_filled = any(delta is not None for delta in deltas)
        if not (is_filled or self.filled[slot]):
            return
        self.filled[slot] = True  # until it is known to be empty
        self.a[slot].zero_()
        for number, delta in enumerate(deltas):
            b = self.b(number)[slot].zero_()
            if delta is not None:
                rank = len(delta.a)
                self.a[slot, number, :rank].copy_(delta.a)
                b[:rank].copy_(delta.b.t())
        self.filled[slot] = is_filled

    def add(self, y: torch.Tensor, x: torch.Tensor, step: StepSlots) -> None:
        """To y (T, outputs), in place, of x (T, inputs)."""
        low, high = step.first, step.stop
        if not any(self.filled[low:high]):
            return
        count, num_parts = high - low, len(self.parts)
        inner = (x @ self.a[low:high].flatten(0, 2).t()).view(-1, count, num_parts, self.rank)
        if step.others is not None:
            inner.masked_fill_(step.others[:, :, None, None], 0.0)
        for number, part in enumerate(self.parts):
            of_part = inner[:, :, number].reshape(-1, count * self.rank)
            y[:, part.start : part.start + part.size].addmm_(of_part, self.b(number)[low:high].flatten(0, 1))


class LoraLinear(nn.Module):
    """Stands in for `linear`, whatever class that is; called as it is called."""

    def __init__(self, linear: Any, stack: LoraStack, in_step: InStep) -> None:
        super().__init__()
        self.linear = linear
        self.lora_stack = stack
        self.out_features, self.in_features = linear.weight.shape
        self.adds_as_it_multiplies = bool(getattr(linear, "adds_as_it_multiplies", False))
        self.was_called = False
        """With an adapter."""
        self._in_step = in_step

    @property
    def weight(self) -> torch.Tensor:
        """W, or what stands for it."""
        return self.linear.weight  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        y: torch.Tensor = self.linear(x)
        step = self._in_step.slots
        if step is not None:
            self.was_called = True
            step = step.of_rows(self._in_step.call_rows.rows)
            self.lora_stack.add(y.view(-1, self.out_features), x.reshape(-1, self.in_features), step)
        return y

    def forward_add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The same, plus `other` of the result's shape."""
        if self._in_step.slots is None:
            return self.linear.forward_add(x, other)  # type: ignore[no-any-return]
        return other + self.forward(x)
