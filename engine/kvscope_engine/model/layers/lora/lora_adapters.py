"""LoRA adapters of an engine: the loaded adapters, their names, and their slots on the device.

Owns names, weights in host memory, and the assignment of slots. An adapter that a step uses is given a slot if it has
none: a free one, or that of the least recently used adapter. With tensor parallelism, the other ranks then receive
their shard of the adapter's weights and the index of the slot; they do not know adapter names. The weights of an
unloaded adapter stay until no request uses it. Must not depend on the scheduler, which ensures that a step uses no more
adapters than there are slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from kvscope_engine.model.distributed.rank import Rank
from kvscope_engine.model.layers.lora.lora_slots import StepRows, lora_slots
from kvscope_engine.model.layers.lora.peft_folder import AdapterWeights, Delta, read_adapter
from kvscope_engine.model.platforms.device import choose_device, choose_dtype
from kvscope_engine.policy.adapter import NO_UPDATING, Adapter
from kvscope_engine.policy.step_plan import Scheduled
from kvscope_telemetry.engine_config import EngineConfig, LoraModule
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import LoadedAdapter

if TYPE_CHECKING:
    from kvscope_engine.model.loaded_model import LoadedModel

NO_LORA_SLOT: Final = -1


class LoraBroadcaster(Protocol):
    """Sends LoRA weights to the other ranks of tensor parallelism; implemented in `executor.leader`."""

    def fill_lora_slot(self, stack: str, slot: int, deltas: Callable[[Rank], Sequence[Delta | None]]) -> None:
        """Replace the LoRA weights in a slot on all other ranks, before their next step.

        Args:
            stack: Name of the stack (`LoraSlots.stacks`).
            slot: Index of the slot.
            deltas: Returns the weights of the given rank's shard, one entry per layer of the stack.
        """


class LoraAdapters:
    """LoRA adapters of one model. The constructor adds slots to the model's layers and loads the adapters `configured`.

    Without `allow_runtime_lora_updating`, only the layers of these adapters get slots.

    Raises BadInput for an adapter that does not fit the model.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        configured: Sequence[tuple[LoraModule, AdapterWeights]],
        others: LoraBroadcaster | None = None,
    ) -> None:
        slots = lora_slots(config, loaded, adapted_layers(configured))
        assert slots is not None, "adapters are asked for"
        self.slots = slots
        self._others = others
        self._rank, self._shardings = loaded.rank, loaded.shardings
        self._model_name = loaded.info.name
        self._dtype, self._max_rank = loaded.dtype, config.max_lora_rank
        self._can_update = config.allow_runtime_lora_updating
        self._names: dict[str, tuple[Adapter, str]] = {}
        self._weights: dict[Adapter, AdapterWeights] = {}
        self._slot_of: dict[Adapter, int] = {}
        """Slot of each adapter that has one, least recently used first."""
        self._num_slots = config.num_lora_slots
        for module, weights in configured:
            self._add_adapter(module.name, module.path, weights)

    @property
    def can_update(self) -> bool:
        """Whether adapters can be loaded and unloaded while the engine serves."""
        return self._can_update

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """Adapters that requests may use, in the order in which they were loaded."""
        return tuple(LoadedAdapter(name=name, path=path) for name, (_, path) in self._names.items())

    def find(self, name: str) -> Adapter:
        """Return the adapter called `name`. Raises BadInput if it is not loaded."""
        entry = self._names.get(name)
        if entry is None:
            loaded_names = ", ".join(self._names) or "none"
            raise BadInput(f"LoRA adapter {name!r:.140} is not loaded: {loaded_names:.300} here")
        return entry[0]

    def load(self, name: str, path: str) -> None:
        """Read an adapter and accept requests for it.

        Raises:
            BadInput: The adapter is not accepted. Nothing has changed.
        """
        self._check_can_update()
        self._check_name(name)
        self._add_adapter(name, path, read_adapter(name, path, self._max_rank, self._dtype))

    def unload(self, name: str) -> None:
        self._check_can_update()
        self.find(name)
        del self._names[name]

    def release_unused(self, in_use: Iterable[Adapter | None]) -> None:
        """Free the weights of adapters that are unloaded and not in `in_use`."""
        needed = {adapter for adapter, _ in self._names.values()} | set(in_use)
        for adapter in [adapter for adapter in self._weights if adapter not in needed]:
            del self._weights[adapter]
            self._slot_of.pop(adapter, None)

    def rows_of(self, scheduled: Sequence[Scheduled]) -> StepRows | None:
        """Assign slots to the adapters of a step and return the slot of each row; None if no row has an adapter."""
        adapters = [item.request.adapter for item in scheduled]
        needed = dict.fromkeys(adapter for adapter in adapters if adapter is not None)
        if not needed:
            return None
        self._make_resident(needed)
        slots = [NO_LORA_SLOT if adapter is None else self._slot_of[adapter] for adapter in adapters]
        return StepRows(np.repeat(np.array(slots, np.int64), [item.num_tokens for item in scheduled]))

    def _make_resident(self, needed: dict[Adapter, None]) -> None:
        assert len(needed) <= self._num_slots, f"{len(needed)} adapters in a step, {self._num_slots} slots"
        for adapter in needed:
            slot = self._slot_of.pop(adapter, None)
            if slot is None:
                slot = self._free_slot(needed)
                self._fill(slot, self._weights[adapter])
            self._slot_of[adapter] = slot  # most recently used

    def _free_slot(self, needed: dict[Adapter, None]) -> int:
        used = set(self._slot_of.values())
        free = next((slot for slot in range(self._num_slots) if slot not in used), None)
        if free is not None:
            return free
        return self._slot_of.pop(next(adapter for adapter in self._slot_of if adapter not in needed))

    def _fill(self, slot: int, weights: AdapterWeights) -> None:
        for stack, names in self.slots.stacks.items():
            if not (self.slots.is_filled(stack, slot) or any(name in weights.deltas for name in names)):
                continue
            shard = partial(self._shard, names, weights)
            self.slots.fill(stack, slot, shard(self._rank))
            if self._others is not None:
                self._others.fill_lora_slot(stack, slot, shard)

    def _shard(self, names: Sequence[str], weights: AdapterWeights, rank: Rank) -> list[Delta | None]:
        """Return a rank's shard of the deltas of the layers `names`: rows of B if the rank has rows of the layer's
        weight, columns of A if it has columns.
        """
        deltas: list[Delta | None] = []
        for name in names:
            delta, sharding = weights.deltas.get(name), self._shardings.get(name)
            if delta is not None and sharding is not None:
                part = sharding.part(rank)
                delta = Delta(delta.a, delta.b[part]) if sharding.dim == 0 else Delta(delta.a[:, part], delta.b)
            deltas.append(delta)
        return deltas

    def _add_adapter(self, name: str, path: str, weights: AdapterWeights) -> None:
        try:
            for layer, (a, b) in weights.deltas.items():
                self._check_layer(layer, (len(b), a.shape[1]))
        except BadInput as error:
            raise BadInput(f"LoRA adapter {name!r:.140} ({path!r:.200}): {error}") from error
        adapter = Adapter(name, weights.key)
        self._names[name] = (adapter, path)
        self._weights[adapter] = weights

    def _check_layer(self, layer: str, shape: tuple[int, int]) -> None:
        shard_shape = self.slots.shape(layer)
        if shard_shape is None:
            raise BadInput(
                f"{layer!r:.160} is no linear layer of this model that adapters are for: {self.slots.layer_kinds:.300}"
            )
        full_shape = list(shard_shape)
        if (sharding := self._shardings.get(layer)) is not None:
            full_shape[sharding.dim] = sharding.size
        if tuple(full_shape) != shape:
            raise BadInput(
                f"{layer!r:.160} is for {shape[1]} inputs and {shape[0]} outputs,"
                f" this model's has {full_shape[1]} and {full_shape[0]}"
            )

    def _check_can_update(self) -> None:
        if not self._can_update:
            raise BadInput(NO_UPDATING)

    def _check_name(self, name: str) -> None:
        if name in self._names:
            raise BadInput(f"LoRA adapter {name!r:.140} is loaded already: unload it first")
        if name == self._model_name:
            raise BadInput(f"LoRA adapter {name!r:.140} is not accepted: the model is called so")


def adapted_layers(configured: Sequence[tuple[LoraModule, AdapterWeights]]) -> frozenset[str]:
    return frozenset(name for _, weights in configured for name in weights.deltas)


def read_configured_adapters(config: EngineConfig) -> list[tuple[LoraModule, AdapterWeights]]:
    """Read the adapters of `config`, in the dtype that its model will have.

    Raises:
        BadInput: `read_adapter` refuses an adapter, or two adapters have the same name.
    """
    if not config.lora_modules:
        return []
    dtype = choose_dtype(config.dtype, choose_device(config.device))
    duplicates = [name for name, count in Counter(module.name for module in config.lora_modules).items() if count > 1]
    if duplicates:
        raise BadInput(f"lora_modules: name {duplicates[0]!r:.140} is given twice")
    return [
        (module, read_adapter(module.name, module.path, config.max_lora_rank, dtype)) for module in config.lora_modules
    ]
