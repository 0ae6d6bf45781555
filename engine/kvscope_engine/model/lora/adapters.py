"""The LoRA adapters of an engine: which are loaded, under which names, and which of them have a slot on the device.

Owns names, weights in host memory and slots. An adapter that a step asks for gets a slot when it has none, from the one
that was not asked for the longest; the copy runs in the order of the steps. What is unloaded stays for the requests
that have it. Knows no scheduler, whose it is that no more adapters run together than there are slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.loading.device import choose_device, choose_dtype
from kvscope_engine.model.lora.install import Place, install, layer_names
from kvscope_engine.model.lora.linear import LoraStack, StepSlots
from kvscope_engine.model.lora.peft_folder import AdapterWeights, read_adapter
from kvscope_engine.policy.adapter import Adapter
from kvscope_engine.policy.plan import Scheduled
from kvscope_telemetry.engine_config import EngineConfig, LoraModule
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import LoadedAdapter

if TYPE_CHECKING:
    from kvscope_engine.model.loading.loader import LoadedModel

NO_SLOT: Final = -1
NO_UPDATING: Final = (
    "adapters are loaded and unloaded only at an engine that was started with --allow-runtime-lora-updating"
)


@dataclass(frozen=True, slots=True)
class StepRows:
    """Which adapters the rows of a step ask for, by slot."""

    slots: NDArray[np.int64]
    """(T,), -1: none."""
    first: int
    stop: int

    @property
    def is_of_one(self) -> bool:
        """Whether all rows ask for the same."""
        return self.stop - self.first == 1 and bool((self.slots == self.first).all())


class LoraAdapters:
    """Of one model, in which places for them are made; `given` are loaded at once. Raises BadInput for one that does
    not fit the model.

    Without `allow_runtime_lora_updating` there are only places for the layers of these.
    """

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, given: Sequence[tuple[LoraModule, AdapterWeights]]
    ) -> None:
        self._model_name = loaded.info.name
        self._dtype, self._max_rank = loaded.dtype, config.max_lora_rank
        self._takes_more = config.allow_runtime_lora_updating
        self._names: dict[str, tuple[Adapter, str]] = {}
        self._weights: dict[Adapter, AdapterWeights] = {}
        self._slot_of: dict[Adapter, int] = {}
        """The one longest not asked for first."""
        self._num_slots = config.num_lora_slots
        self._kinds = sorted({name.rpartition(".")[2] for name in layer_names(loaded.module)})
        asked = {name for _, weights in given for name in weights.deltas}
        like = torch.empty(0, dtype=loaded.dtype, device=loaded.device)
        self._in_step, self._places = install(
            loaded.module, lambda name: self._takes_more or name in asked, self._num_slots, self._max_rank, like
        )
        for module, weights in given:
            self._add(module.name, module.path, weights)

    @property
    def takes_more(self) -> bool:
        """Whether adapters are loaded and unloaded while the engine serves."""
        return self._takes_more

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """Those that requests may ask for, in the order they came."""
        return tuple(LoadedAdapter(name=name, path=path) for name, (_, path) in self._names.items())

    def find(self, name: str) -> Adapter:
        """The adapter of this name. Raises BadInput where none is loaded."""
        found = self._names.get(name)
        if found is None:
            known = ", ".join(self._names) or "none"
            raise BadInput(f"LoRA adapter {name!r:.140} is not loaded: {known:.300} here")
        return found[0]

    def load(self, name: str, path: str) -> None:
        """Read an adapter and take requests for it. Raises BadInput, and nothing is changed."""
        self._check_takes_more()
        self._check_name(name)
        self._add(name, path, read_adapter(name, path, self._max_rank, self._dtype))

    def unload(self, name: str) -> None:
        """Take no more requests for it. Raises BadInput where it is not loaded."""
        self._check_takes_more()
        self.find(name)
        del self._names[name]

    def forget_unused(self, in_use: Iterable[Adapter | None]) -> None:
        """Give up the weights of those that are unloaded, and that no request has any more."""
        kept = {adapter for adapter, _ in self._names.values()} | set(in_use)
        for adapter in [adapter for adapter in self._weights if adapter not in kept]:
            del self._weights[adapter]
            self._slot_of.pop(adapter, None)

    def rows_of(self, scheduled: Sequence[Scheduled]) -> StepRows | None:
        """What the rows of a step ask for, which has its slots from here on; None: no row has an adapter."""
        adapters = [item.request.adapter for item in scheduled]
        wanted = dict.fromkeys(adapter for adapter in adapters if adapter is not None)
        if not wanted:
            return None
        self._make_resident(wanted)
        each = [NO_SLOT if adapter is None else self._slot_of[adapter] for adapter in adapters]
        used = [self._slot_of[adapter] for adapter in wanted]
        slots = np.repeat(np.array(each, np.int64), [item.num_tokens for item in scheduled])
        return StepRows(slots, min(used), max(used) + 1)

    @contextmanager
    def applied(self, rows: StepRows, slots: torch.Tensor) -> Iterator[None]:
        """Inside, the model computes a step of these rows; `slots` are theirs, on the device."""
        others = None
        if not rows.is_of_one:
            others = slots[:, None] != torch.arange(rows.first, rows.stop, device=slots.device)
        self._in_step.slots = StepSlots(rows.first, rows.stop, others)
        try:
            yield
        finally:
            self._in_step.slots = None

    @contextmanager
    def in_full(self) -> Iterator[None]:
        """Inside, before anything has a slot, each row takes all of them: as much memory as any step."""
        stacks = list(self._stacks())
        for stack in stacks:
            stack.filled = [True] * self._num_slots
        self._in_step.slots = StepSlots(0, self._num_slots, None)
        try:
            yield
        finally:
            self._in_step.slots = None
            for stack in stacks:
                stack.filled = [False] * self._num_slots

    def _make_resident(self, wanted: dict[Adapter, None]) -> None:
        assert len(wanted) <= self._num_slots, f"{len(wanted)} adapters in a step, {self._num_slots} slots"
        for adapter in wanted:
            slot = self._slot_of.pop(adapter, None)
            if slot is None:
                slot = self._free_slot(wanted)
                self._fill(slot, self._weights[adapter])
            self._slot_of[adapter] = slot  # the last one asked for

    def _free_slot(self, wanted: dict[Adapter, None]) -> int:
        taken = set(self._slot_of.values())
        free = next((slot for slot in range(self._num_slots) if slot not in taken), None)
        if free is not None:
            return free
        return self._slot_of.pop(next(adapter for adapter in self._slot_of if adapter not in wanted))

    def _fill(self, slot: int, weights: AdapterWeights) -> None:
        for stack in self._stacks():
            stack.fill(slot, [weights.deltas.get(part.name) for part in stack.parts])

    def _stacks(self) -> Iterable[LoraStack]:
        return {id(place.stack): place.stack for place in self._places.values()}.values()

    def _add(self, name: str, path: str, weights: AdapterWeights) -> None:
        try:
            for layer, (a, b) in weights.deltas.items():
                self._check_layer(layer, (len(b), a.shape[1]))
        except BadInput as error:
            raise BadInput(f"LoRA adapter {name!r:.140} ({path!r:.200}): {error}") from error
        adapter = Adapter(name, weights.key)
        self._names[name] = (adapter, path)
        self._weights[adapter] = weights

    def _check_layer(self, layer: str, shape: tuple[int, int]) -> None:
        place: Place | None = self._places.get(layer)
        if place is None:
            raise BadInput(
                f"{layer!r:.160} is no linear layer of this model that adapters are for: {', '.join(self._kinds):.300}"
            )
        if place.shape != shape:
            raise BadInput(
                f"{layer!r:.160} is for {shape[1]} inputs and {shape[0]} outputs,"
                f" this model's has {place.shape[1]} and {place.shape[0]}"
            )

    def _check_takes_more(self) -> None:
        if not self._takes_more:
            raise BadInput(NO_UPDATING)

    def _check_name(self, name: str) -> None:
        if name in self._names:
            raise BadInput(f"LoRA adapter {name!r:.140} is loaded already: unload it first")
        if name == self._model_name:
            raise BadInput(f"LoRA adapter {name!r:.140} is not accepted: the model is called so")


def read_given(config: EngineConfig) -> list[tuple[LoraModule, AdapterWeights]]:
    """The adapters of `config`, in the type that its model will have. Raises BadInput as `read_adapter` does, and for a
    name that two have."""
    if not config.lora_modules:
        return []
    dtype = choose_dtype(config.dtype, choose_device(config.device))
    twice = [name for name, count in Counter(module.name for module in config.lora_modules).items() if count > 1]
    if twice:
        raise BadInput(f"lora_modules: name {twice[0]!r:.140} is given twice")
    return [
        (module, read_adapter(module.name, module.path, config.max_lora_rank, dtype)) for module in config.lora_modules
    ]
