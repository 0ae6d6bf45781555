"""Runs a model's recurrent layers on a flattened batch of several sequences, each with a separate state.

transformers runs such a layer on whole sequences, with the state in a cache object. Here the layer's own `forward` is
called for each sequence's tokens, with that sequence's rows of the `StateStorage` as the cache. Decodes run in one call
if the layer supports that. Trial runs determine what each layer supports when the model is loaded (`recurrent_check`).

Must not depend on requests or on the assignment of slots.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.nn.functional import silu, softplus
from transformers.cache_utils import LinearAttentionLayer

from kvscope_engine.model.kv_cache.state_storage import LayerState, StateSlots, StateStorage
from kvscope_engine.model.layers.attention_interface import forward_source, uses_interface
from kvscope_engine.model.layers.recurrent.mamba_update import forward_calling, limits_steps, with_in_place_update

MAX_STATES: Final = 8
"""Maximum number of states of one kind per layer in transformers' cache."""
LOWEST: Final = -1e30
"""Initial value of the running maximum in RWKV's state, as in transformers."""
SCAN_FUNCTION: Final = "mamba_selective_scan"
"""Name in transformers of Mamba 1's scan function."""
_MASKS: Final = ("attention_mask", "mask")


class StateStep(Protocol):
    """Runs recurrent layers in a step with the states of the step's sequences. Stubs for trial runs implement
    this protocol too.
    """

    def run(self, layer: RecurrentLayer, arguments: dict[str, Any]) -> Any: ...


@dataclass(slots=True)
class CallRows:
    """Rows of the flattened batch for which a recurrent layer is being called, in the order of the call.

    `rows` is None for all rows, in batch order. Read by modules inside the layer whose results depend on the row
    (LoRA).
    """

    rows: slice | torch.Tensor | None = None
    is_in_prompt: bool = False
    """Whether the tokens belong to a prompt, whose results must not depend on how the prompt is split."""


@dataclass(slots=True)
class RecurrentLayer:
    """A module with a recurrent state, called through its unchanged `forward`."""

    number: int
    """Index among the model's recurrent layers, in the order of its modules."""
    name: str
    module: nn.Module
    forward: Callable[..., Any]
    caller: StateCaller
    names: tuple[str, ...]
    """Names of the arguments of `forward`."""
    call_rows: CallRows
    """Rows of the running call. All layers of a model share this object."""
    state: LayerState = ()
    """Shapes and dtypes of the tensors of one request's state, determined by a trial run."""
    scan: ContinuedScan | None = None
    """Runs several tokens from an existing state; None if transformers' own `forward` can do that."""
    supports_pieces: bool = False
    """Whether several tokens can continue from a state in one call. If False, tokens after a sequence's first
    call run in one call each.
    """
    supports_batches: bool = False
    """Whether single tokens of several sequences can run in one call."""

    def call_for_rows(
        self,
        rows: slice | torch.Tensor,
        arguments: dict[str, Any],
        states: Sequence[torch.Tensor],
        *,
        has_initial_state: bool,
        is_in_prompt: bool = False,
    ) -> Any:
        """Return the output of `call` for `rows` of the flattened batch. Modules inside the layer can read `rows`."""
        self.call_rows.rows, self.call_rows.is_in_prompt = rows, is_in_prompt
        try:
            return self.call(arguments, states, has_initial_state=has_initial_state)[0]
        finally:
            self.call_rows.rows, self.call_rows.is_in_prompt = None, False

    def call(
        self, arguments: dict[str, Any], states: Sequence[torch.Tensor] | None, *, has_initial_state: bool
    ) -> tuple[Any, dict[tuple[str, int], torch.Tensor]]:
        """Run the layer. Returns the layer's output and its new states by kind and index.

        The tensors in `states`, if given, have one row per sequence and are overwritten with the new states. Their
        previous contents are used only if `has_initial_state`.
        """
        initial_states = {} if states is None else dict(zip(_keys(self.state), states, strict=True))
        output, new_states = self.caller.call(self, arguments, initial_states, has_initial_state=has_initial_state)
        for key, tensor in initial_states.items():
            if new_states[key] is not tensor:
                tensor.copy_(new_states[key])
        return output, new_states


class StateCaller(Protocol):
    """Passes states to one kind of module and returns the new ones."""

    def call(
        self,
        layer: RecurrentLayer,
        arguments: dict[str, Any],
        initial_states: dict[tuple[str, int], torch.Tensor],
        *,
        has_initial_state: bool,
    ) -> tuple[Any, dict[tuple[str, int], torch.Tensor]]:
        """Run the layer. Unless `has_initial_state`, the tensors in `initial_states` are only overwritten.

        `initial_states` is empty in a trial run.
        """


class RecurrentLayers:
    """Recurrent layers of a model. Create it once per model, because it replaces the `forward` of the layers.

    While the model runs a step, the layers use the states of the step; otherwise each runs as in transformers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[RecurrentLayer] = []
        self.call_rows = CallRows()
        self._step: StateStep | None = None
        for name, part in list(model.named_modules()):
            caller = _caller_of(type(part))
            if caller is not None:
                self._replace_forward(name, part, caller)
        self.has_attention = not self.layers or any(uses_interface(type(part)) for part in model.modules())
        """Whether any layer has keys and values."""
        if self.layers:
            for part in {id(part): part for part in (model, model.base_model)}.values():
                self._hook_model(part)  # type: ignore[arg-type]

    @property
    def batches_decodes(self) -> bool:
        """Whether each layer runs decodes of several sequences in one call, which CUDA graphs require."""
        return all(layer.supports_batches for layer in self.layers)

    @property
    def states(self) -> list[LayerState]:
        """Shapes and dtypes of one request's state tensors, for each recurrent layer."""
        return [layer.state for layer in self.layers]

    def _replace_forward(self, name: str, submodule: nn.Module, caller: StateCaller) -> None:
        names = tuple(inspect.signature(submodule.forward).parameters)
        original_forward = with_in_place_update(submodule, lambda: self.call_rows.is_in_prompt) or submodule.forward
        layer = RecurrentLayer(
            len(self.layers),
            name,
            submodule,
            original_forward,
            caller,
            names,
            self.call_rows,
            scan=ContinuedScan.of(submodule),
        )
        self.layers.append(layer)

        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            arguments.pop("paged", None)
            return layer.forward(**arguments) if self._step is None else self._step.run(layer, arguments)

        submodule.forward = forward

    def _hook_model(self, part: nn.Module) -> None:
        """Make the layers use the states in the keyword `paged` while `part` runs.

        If no layer attends, the keyword is removed: nothing else reads it, and some models do not accept it.
        """
        previous_steps: list[StateStep | None] = []

        def set_step(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            previous_steps.append(self._step)
            if "paged" in kwargs:
                self._step = getattr(kwargs["paged"], "states", None)
            if self.has_attention or part is not part.base_model:
                return None
            return args, {name: value for name, value in kwargs.items() if name != "paged"}

        def restore_step(*_: Any) -> None:
            self._step = previous_steps.pop()

        part.register_forward_pre_hook(set_step, with_kwargs=True)
        part.register_forward_hook(restore_step, always_call=True)


def recurrent_layers(model: nn.Module) -> RecurrentLayers:
    """Return the recurrent layers of `model`; the first call replaces their `forward`."""
    layers: RecurrentLayers | None = getattr(model, "kvscope_recurrent", None)
    if layers is None:
        layers = RecurrentLayers(model)
        model.kvscope_recurrent = layers  # type: ignore[assignment]
    return layers


def is_recurrent_layer(module_class: Any) -> bool:
    """Whether modules of `module_class` are recurrent layers with a supported state, judged by their source code."""
    return _caller_of(module_class) is not None


@dataclass(slots=True)
class StateBatch(StateStep):
    """Runs recurrent layers on a step's sequences, with their states in slots."""

    storage: StateStorage
    slots: Sequence[int]
    """Slot of each sequence of the flattened batch."""
    has_initial_state: Sequence[bool]
    """Whether each sequence's slot has the state after its previous tokens; False if the step computes the
    sequence's first tokens.
    """
    query_start: Sequence[int]
    """First batch row of each sequence, followed by the total number of rows, (sequences + 1,)."""
    saves: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """Pairs (batch row, slot) by sequence: the state before the row is copied to the slot."""
    in_prompt: Sequence[bool] = ()
    """Whether each sequence's tokens are part of its prompt; empty if no sequence runs prompt tokens."""
    decodes: list[int] = field(default_factory=list)
    """Indices of the sequences that can run in one call, in the order of their slots; empty if there is at most one."""
    decode_slots: StateSlots | None = None
    decode_rows: slice | torch.Tensor | None = None
    """Batch rows of `decodes`, in the same order; int64 on the device unless they are consecutive."""

    def __post_init__(self) -> None:
        singles = [
            number
            for number, (start, end) in enumerate(pairwise(self.query_start))
            if end - start == 1 and self.has_initial_state[number]
        ]
        if len(singles) > 1:
            self.decodes = sorted(singles, key=self.slots.__getitem__)
            slots = [self.slots[number] for number in self.decodes]
            self.decode_slots = StateSlots(slots, self.storage.device)
            rows = [self.query_start[number] for number in self.decodes]
            is_run = rows == list(range(rows[0], rows[0] + len(rows)))
            self.decode_rows = (
                slice(rows[0], rows[-1] + 1) if is_run else torch.tensor(rows, device=self.storage.device)
            )

    def run(self, layer: RecurrentLayer, arguments: dict[str, Any]) -> Any:
        num_tokens, tensors = self.query_start[-1], self.storage.layer(layer.number)
        outputs: dict[int, Any] = {}
        batched = self.decodes if layer.supports_batches else []
        # Where the layer limits its time steps, one token of a prompt is computed differently than a decode.
        in_prompt = self.in_prompt if self.in_prompt and limits_steps(layer.module) else [False] * len(self.slots)
        if any(in_prompt[number] for number in batched):
            batched = []
        if batched:
            assert self.decode_slots is not None, "decodes that run together have slots"
            assert self.decode_rows is not None, "decodes that run together have rows"
            rows = [self.query_start[number] for number in batched]
            states = [self.decode_slots.read(tensor) for tensor in tensors]
            tokens = _sequences_first(arguments, num_tokens, self.decode_rows)
            output = layer.call_for_rows(self.decode_rows, tokens, states, has_initial_state=True)
            for tensor, state in zip(tensors, states, strict=True):
                self.decode_slots.write(tensor, state)
            outputs |= {row: _select_sequence(output, index) for index, row in enumerate(rows)}
            for number in batched:
                self._save(number, self.query_start[number + 1], tensors)
        for number, (start, end) in enumerate(pairwise(self.query_start)):
            if start in outputs:
                continue
            slot = self.slots[number]
            states = [tensor[slot : slot + 1] for tensor in tensors]
            has_initial_state = self.has_initial_state[number]
            for first, last in self._pieces(layer, number, start, end):
                tokens = slice_tokens(arguments, num_tokens, first, last)
                outputs[first] = layer.call_for_rows(
                    slice(first, last),
                    tokens,
                    states,
                    has_initial_state=has_initial_state,
                    is_in_prompt=in_prompt[number],
                )
                self._save(number, last, tensors)
                has_initial_state = True
        assert outputs, "a step has tokens"
        missing = num_tokens - sum(_length(output) for output in outputs.values())
        assert missing == 0, f"{layer.name} left out {missing} tokens"
        return concatenate_outputs([outputs[start] for start in sorted(outputs)])

    def _pieces(self, layer: RecurrentLayer, number: int, start: int, end: int) -> list[tuple[int, int]]:
        """Split the tokens of a sequence into calls as (start, end), which end at each row before which a state is
        saved.

        If the layer does not support several tokens that continue from a state, each call has one token, except a
        sequence's first call.
        """
        ends = sorted({end, *(row for row, _ in self.saves.get(number, ()))})
        pieces: list[tuple[int, int]] = []
        for last in ends:
            first = pieces[-1][1] if pieces else start
            if layer.supports_pieces or not (pieces or self.has_initial_state[number]):
                pieces.append((first, last))
            else:
                pieces += [(token, token + 1) for token in range(first, last)]
        return pieces

    def _save(self, number: int, row: int, tensors: Sequence[torch.Tensor]) -> None:
        for save_row, slot in self.saves.get(number, ()):
            if save_row == row:
                for tensor in tensors:
                    tensor[slot].copy_(tensor[self.slots[number]])


@dataclass(frozen=True, slots=True, eq=False)
class StateDecodes(StateStep):
    """Runs recurrent layers on a batch of decodes in a CUDA graph. Slots are read from a tensor, so they can change
    between replays.
    """

    storage: StateStorage
    slots: torch.Tensor
    """Slot of each sequence, shape (sequences,), int64, on the device."""

    def run(self, layer: RecurrentLayer, arguments: dict[str, Any]) -> Any:
        tensors, count = self.storage.layer(layer.number), len(self.slots)
        states = [tensor.index_select(0, self.slots) for tensor in tensors]
        output, _ = layer.call(_sequences_first(arguments, count, slice(0, count)), states, has_initial_state=True)
        for tensor, state in zip(tensors, states, strict=True):
            tensor.index_copy_(0, self.slots, state)
        if isinstance(output, torch.Tensor):
            return output.flatten(0, 1)[None]
        return tuple(
            value.flatten(0, 1)[None]
            if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[:2] == (count, 1)
            else None
            for value in output
        )


def slice_tokens(arguments: dict[str, Any], num_tokens: int, start: int, end: int) -> dict[str, Any]:
    """Return a layer's arguments for tokens `start` to `end` only, without masks, because nothing is padded."""
    return _map_token_rows(arguments, num_tokens, lambda values: values[:, start:end])


def concatenate_outputs(outputs: Sequence[Any]) -> Any:
    """Concatenate a layer's outputs for consecutive tokens, as if it had been called once for all.

    Values that are not tensors with one row per token, such as returned states, become None.
    """
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return first if len(outputs) == 1 else torch.cat(list(outputs), 1)
    if not isinstance(first, tuple):
        return None
    lengths = [_length(output) for output in outputs]
    columns = [[output[index] for output in outputs] for index in range(len(first))]
    return tuple(
        torch.cat(column, 1)
        if all(isinstance(value, torch.Tensor) for value in column)
        and [value.shape[1] if value.dim() > 1 else 0 for value in column] == lengths
        else None
        for column in columns
    )


def _sequences_first(arguments: dict[str, Any], num_tokens: int, rows: slice | torch.Tensor) -> dict[str, Any]:
    """Return the arguments for `rows` of the batch, (1, T, ...), as sequences of one token each, (rows, 1, ...).

    Not implemented as a transposition of the first two axes, because torch's matmuls copy their weights for each
    sequence if the strides are those of a transposed tensor.
    """
    return _map_token_rows(arguments, num_tokens, lambda values: values[0, rows].unsqueeze(1))


def _select_sequence(output: Any, index: int) -> Any:
    if isinstance(output, torch.Tensor):
        return output[index : index + 1]
    return tuple(value[index : index + 1] if isinstance(value, torch.Tensor) else value for value in output)


def _map_token_rows(
    arguments: dict[str, Any], num_tokens: int, change: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """Apply `change` to each argument that has one row per token, and drop masks."""

    def map_value(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map_value(each) for each in value)
        has_token_rows = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[:2] == (1, num_tokens)
        return change(value) if has_token_rows else value

    return {name: None if name in _MASKS else map_value(value) for name, value in arguments.items()}


def _length(output: Any) -> int:
    first = output if isinstance(output, torch.Tensor) else output[0]
    return int(first.shape[1])


def _keys(state: LayerState) -> list[tuple[str, int]]:
    return [(part.kind, part.index) for part in state]


# Storage of states in transformers' modules.


@dataclass(frozen=True, slots=True)
class _CacheCaller(StateCaller):
    """Passes states in a transformers `Cache` (`LinearAttentionLayer`), as most model families expect."""

    argument: str

    def call(
        self,
        layer: RecurrentLayer,
        arguments: dict[str, Any],
        initial_states: dict[tuple[str, int], torch.Tensor],
        *,
        has_initial_state: bool,
    ) -> tuple[Any, dict[tuple[str, int], torch.Tensor]]:
        cache_layer = LinearAttentionLayer(MAX_STATES)
        for (kind, index), tensor in initial_states.items():
            if kind == "conv":
                cache_layer.conv_states[index], cache_layer.is_conv_states_initialized[index] = tensor, True
                cache_layer.conv_kernel_size[index] = tensor.shape[-1]
            else:
                cache_layer.recurrent_states[index], cache_layer.is_recurrent_states_initialized[index] = tensor, True
            cache_layer.has_previous_state[index] = has_initial_state
        if layer.scan is not None and has_initial_state and arguments["hidden_states"].shape[1] > 1:
            output = layer.scan.forward(
                initial_states["recurrent", 0], arguments | {self.argument: _LayerCache(cache_layer)}
            )
        else:
            output = layer.forward(**arguments | {self.argument: _LayerCache(cache_layer)})
        states = {("conv", index): state for index, state in cache_layer.conv_states.items() if state is not None}
        states |= {
            ("recurrent", index): state for index, state in cache_layer.recurrent_states.items() if state is not None
        }
        return output, states


class _LayerCache:
    """Stub with the methods of a transformers `Cache` that recurrent layers call. It holds a single layer, for any
    layer index.
    """

    def __init__(self, layer: LinearAttentionLayer) -> None:
        self._layer = layer

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._layer.conv_states[state_idx] if self._layer.has_previous_state[state_idx] else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._layer.recurrent_states[state_idx] if self._layer.has_previous_state[state_idx] else None

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        updated: torch.Tensor = self._layer.update_conv_state(conv_states, state_idx, **kwargs)
        return updated

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        updated: torch.Tensor = self._layer.update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return updated

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self._layer.has_previous_state[state_idx or 0])

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


class ContinuedScan:
    """Runs several tokens of a Mamba 1 layer from an existing state; transformers' scan always starts from zero.

    A scan is linear in its initial state, so the contribution of that state is added to each output and to the final
    state. The contribution decays by exp(A * elapsed time). The layer's `forward` runs unchanged, except that it calls
    this scan.
    """

    def __init__(self, module: nn.Module) -> None:
        self._scan: Any = getattr(inspect.unwrap(type(module).forward), "__globals__", {}).get(SCAN_FUNCTION)
        self._states: list[torch.Tensor] = []
        self._forward: Any = forward_calling(module, SCAN_FUNCTION, self._continued)

    @classmethod
    def of(cls, module: nn.Module) -> ContinuedScan | None:
        """Return an instance for the layer `module`; None if the layer does not call `SCAN_FUNCTION`."""
        scan = cls(module)
        return None if scan._forward is None else scan

    def forward(self, state: torch.Tensor, arguments: dict[str, Any]) -> Any:
        """Run tokens (1, T, hidden) from `state`: (1, inner, N), or (1, heads, inner of a head, N) for a scan
        per head.
        """
        self._states = [state.clone()] if state.dim() == 3 else list(state.clone().unbind(1))
        return self._forward(**arguments)

    def _continued(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        *,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the scan in place of transformers' function. hidden_states, dt and z are (1, inner, T), A is (inner,
        N), B and C are (1, N, T).
        """
        output, last = self._scan(hidden_states, dt, A, B, C, z=z, delta_bias=delta_bias, **options)
        time = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
        elapsed = (softplus(time) if options.get("delta_softplus") else time).float().cumsum(-1)
        decayed = torch.exp(A[None, :, None] * elapsed[..., None]) * self._states.pop(0)[:, :, None]
        added_output = torch.einsum("bitn,bnt->bit", decayed, C.float())
        added_output = added_output if z is None else added_output * silu(z)
        return output + added_output.to(output.dtype), last + decayed[:, :, -1].to(last.dtype)


@dataclass(frozen=True, slots=True)
class _MiniMaxCacheCaller(StateCaller):
    """Passes the state as one tensor per layer, in MiniMax's own cache class."""

    argument: str = "past_key_values"

    def call(
        self,
        layer: RecurrentLayer,
        arguments: dict[str, Any],
        initial_states: dict[tuple[str, int], torch.Tensor],
        *,
        has_initial_state: bool,
    ) -> tuple[Any, dict[tuple[str, int], torch.Tensor]]:
        cache = _LinearCache(initial_states[("recurrent", 0)] if has_initial_state else None)
        output = layer.forward(**arguments | {self.argument: cache})
        assert cache.state is not None, f"{layer.name} kept no state"
        return output, {("recurrent", 0): cache.state}


class _LinearCache:
    """Stub with the methods of MiniMax's cache that its lightning attention calls. It holds a single layer."""

    def __init__(self, state: torch.Tensor | None) -> None:
        self.state = state

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self.state

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.state = linear_cache


class _ModuleAttributeCaller(StateCaller):
    """Passes states as attributes of the module, for RecurrentGemma's blocks."""

    def call(
        self,
        layer: RecurrentLayer,
        arguments: dict[str, Any],
        initial_states: dict[tuple[str, int], torch.Tensor],
        *,
        has_initial_state: bool,
    ) -> tuple[Any, dict[tuple[str, int], torch.Tensor]]:
        block: Any = layer.module
        block.conv1d_state = initial_states[("conv", 0)] if has_initial_state else None
        block.rg_lru.recurrent_states = initial_states[("recurrent", 0)] if has_initial_state else None
        try:
            output = layer.forward(**arguments | {"use_cache": True})
            return output, {("conv", 0): block.conv1d_state, ("recurrent", 0): block.rg_lru.recurrent_states}
        finally:
            block.conv1d_state = block.rg_lru.recurrent_states = None


@dataclass(frozen=True, slots=True)
class _StateListCaller(StateCaller):
    """Passes states in a list of five tensors over all layers, for RWKV: inputs of both halves, and sums of the first
    half.
    """

    list_indices: tuple[int, ...]
    options: dict[str, Any]

    def call(
        self,
        layer: RecurrentLayer,
        arguments: dict[str, Any],
        initial_states: dict[tuple[str, int], torch.Tensor],
        *,
        has_initial_state: bool,
    ) -> tuple[Any, dict[tuple[str, int], torch.Tensor]]:
        part: Any = layer.module
        hidden = arguments["hidden"]
        state: list[Any] = [None] * 5
        states = {}
        for index, list_index in enumerate(self.list_indices):
            initial_state = initial_states.get(("recurrent", index))
            if not has_initial_state or initial_state is None:
                initial_state = self._fresh(list_index, part, hidden)
            states["recurrent", index] = initial_state
            state[list_index] = initial_state[:, :, None].expand(-1, -1, part.layer_id + 1)
        output = layer.forward(**arguments | self.options | {"state": state})
        return (output[0], None), states

    @staticmethod
    def _fresh(list_index: int, part: Any, hidden: torch.Tensor) -> torch.Tensor:
        size = hidden.shape[-1] if list_index < 2 else part.attention_hidden_size
        dtype = hidden.dtype if list_index < 2 else torch.float32
        fill = LOWEST if list_index == 4 else 0.0
        return torch.full((len(hidden), size), fill, dtype=dtype, device=hidden.device)


_CALLERS_BY_CLASS: Final[dict[str, StateCaller]] = {
    "MiniMaxLightningAttention": _MiniMaxCacheCaller(),
    "RecurrentGemmaRecurrentBlock": _ModuleAttributeCaller(),
    "RwkvSelfAttention": _StateListCaller((1, 2, 3, 4), {"use_cache": True}),
    "RwkvFeedForward": _StateListCaller((0,), {}),
}


def _caller_of(module_class: Any) -> StateCaller | None:
    if module_class.__name__ in _CALLERS_BY_CLASS:
        return _CALLERS_BY_CLASS[module_class.__name__]
    source = forward_source(module_class)
    if not any(f"{verb}_{state}_state(" in source for verb in ("get", "update") for state in ("conv", "recurrent")):
        return None
    names = inspect.signature(module_class.forward).parameters
    return next((_CacheCaller(name) for name in ("cache_params", "past_key_values") if name in names), None)
