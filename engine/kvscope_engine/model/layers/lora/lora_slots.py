"""LoRA slots on the device: stacks at the linear layers of a model, with one slot per adapter.

Must not depend on names of adapters: `lora_adapters`, on rank 0, assigns slots to them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.layers.lora.lora_install import install, layer_names
from kvscope_engine.model.layers.lora.lora_linear import StepSlots
from kvscope_engine.model.layers.lora.peft_folder import Delta
from kvscope_telemetry.engine_config import EngineConfig

if TYPE_CHECKING:
    from kvscope_engine.model.loaded_model import LoadedModel


class StepRows:
    """Adapter slots that the batch rows of a step use. At least one row must have a slot."""

    def __init__(self, slots: NDArray[np.int64]) -> None:
        self.slots = slots
        """Slot of each row, shape (T,); -1 for rows without adapter."""
        used = slots[slots >= 0]
        self.first, self.stop = int(used.min()), int(used.max()) + 1
        self.has_single_slot = self.stop - self.first == 1 and len(used) == len(slots)
        """Whether all rows use the same slot."""


class LoraSlots:
    """LoRA slots of one model, installed on `layers`, or on all layers that can have deltas if `layers` is None."""

    def __init__(self, loaded: LoadedModel, num_slots: int, max_rank: int, layers: Collection[str] | None) -> None:
        self._num_slots = num_slots
        self.layer_kinds = ", ".join(sorted({name.rpartition(".")[2] for name in layer_names(loaded.module)}))
        """Last name components of the layers that can have deltas, separated by commas, for error messages."""
        like = torch.empty(0, dtype=loaded.dtype, device=loaded.device)
        self._step_state, self._targets = install(
            loaded.module, lambda name: layers is None or name in layers, num_slots, max_rank, like
        )
        self._stacks = {target.stack.parts[0].name: target.stack for target in self._targets.values()}
        self.stacks = {name: tuple(part.name for part in stack.parts) for name, stack in self._stacks.items()}
        """Names of the layers of each stack, by the name of the stack. The names of layers and stacks are the
        same on all ranks.
        """

    def shape(self, layer: str) -> tuple[int, int] | None:
        """Return (outputs, inputs) of a layer on this rank; None if it has no slots."""
        target = self._targets.get(layer)
        return None if target is None else target.shape

    def is_filled(self, stack: str, slot: int) -> bool:
        """Whether a slot contains nonzero weights."""
        return self._stacks[stack].filled[slot]

    def fill(self, stack: str, slot: int, deltas: Sequence[Delta | None]) -> None:
        self._stacks[stack].fill(slot, deltas)

    @contextmanager
    def applied(self, rows: StepRows, slots: torch.Tensor) -> Iterator[None]:
        """Return a context in which the model adds the deltas of the slots in `rows`.

        `slots`: slot of each row, on the device.
        """
        others = None
        if not rows.has_single_slot:
            others = slots[:, None] != torch.arange(rows.first, rows.stop, device=slots.device)
        self._step_state.slots = StepSlots(rows.first, rows.stop, others)
        try:
            yield
        finally:
            self._step_state.slots = None

    @contextmanager
    def all_slots_used(self) -> Iterator[None]:
        """Return a context in which each row uses all slots, to measure the maximum memory of a step. No slot may be
        filled yet.
        """
        stacks = list(self._stacks.values())
        for stack in stacks:
            stack.filled = [True] * self._num_slots
        self._step_state.slots = StepSlots(0, self._num_slots, None)
        try:
            yield
        finally:
            self._step_state.slots = None
            for stack in stacks:
                stack.filled = [False] * self._num_slots


def lora_slots(config: EngineConfig, loaded: LoadedModel, layers: Collection[str]) -> LoraSlots | None:
    """Return the slots for `config`; None without LoRA.

    Without `allow_runtime_lora_updating`, only `layers` get slots.
    """
    if not config.has_lora:
        return None
    layer_names = None if config.allow_runtime_lora_updating else frozenset(layers)
    return LoraSlots(loaded, config.num_lora_slots, config.max_lora_rank, layer_names)


def all_slots_used(slots: LoraSlots | None) -> AbstractContextManager[None]:
    return nullcontext() if slots is None else slots.all_slots_used()
