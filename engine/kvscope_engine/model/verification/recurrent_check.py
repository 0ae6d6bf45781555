"""Trial runs of a model's recurrent layers, which determine what each stores for a request, and how it can run.

A layer must be able to continue from a state with several tokens in a call, and may be able to run single tokens of
several sequences in a call. Not all of transformers' layers can: RecurrentGemma's ignore the state if a call has
several tokens, and RWKV's mix the sequences of a batch. Each layer is run from random states, and compared with a run
that passes one token of one sequence per call.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from kvscope_engine.model.kv_cache.state_storage import StatePart
from kvscope_engine.model.layers.recurrent.recurrent_layers import (
    RecurrentLayer,
    RecurrentLayers,
    StateStep,
    concatenate_outputs,
    slice_tokens,
)
from kvscope_engine.model.tensor_agreement import difference
from kvscope_telemetry.errors import BadInput

BOUND: Final = 1e-3
LOW_BOUND: Final = 5e-2
"""Bound on the relative difference in 16 bits, where sums are rounded differently.

If a layer ignores the state, or uses that of another sequence, the difference is 0.5.
"""
STATE_SIZE: Final = 0.5
NUM_PIECE_TOKENS: Final = 3


class StateTrial(StateStep):
    """Runs one short sequence without initial states, and records each layer's arguments and states."""

    def __init__(self) -> None:
        self._arguments: dict[int, dict[str, Any]] = {}

    def run(self, layer: RecurrentLayer, arguments: dict[str, Any]) -> Any:
        if layer.number in self._arguments:
            raise BadInput(f"its recurrent layer {layer.name} is run twice for a token")
        self._arguments[layer.number] = arguments
        output, states = layer.call(arguments, None, has_initial_state=False)
        layer.state = tuple(
            StatePart(kind, index, tuple(tensor.shape[1:]), tensor.dtype) for (kind, index), tensor in states.items()
        )
        return output

    @torch.inference_mode()
    def check_layers(self, layers: RecurrentLayers) -> None:
        """Determine what each layer supports. Layers of one class are assumed equal.

        Raises BadInput if a layer was not called.
        """
        supported_by_kind: dict[tuple[type, object], tuple[bool, bool]] = {}
        for layer in layers.layers:
            arguments = self._arguments.pop(layer.number, None)
            if arguments is None:
                raise BadInput(f"its recurrent layer {layer.name} is left out")
            kind = (type(layer.module), layer.state)
            if kind not in supported_by_kind:
                supported_by_kind[kind] = _supports_pieces(layer, arguments), _supports_batches(layer, arguments)
            layer.supports_pieces, layer.supports_batches = supported_by_kind[kind]


def _supports_pieces(layer: RecurrentLayer, arguments: dict[str, Any]) -> bool:
    """Whether a call with several prompt tokens gives the same result, from the same state, as calls with one
    token each.
    """
    num_tokens = _num_tokens(arguments)
    piece_states, single_states = _random_states(layer, 1), _random_states(layer, 1)
    try:
        whole, _ = layer.call(
            slice_tokens(arguments, num_tokens, 0, NUM_PIECE_TOKENS), piece_states, has_initial_state=True
        )
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    singles = [
        layer.call_for_rows(
            slice(token, token + 1),
            slice_tokens(arguments, num_tokens, token, token + 1),
            single_states,
            has_initial_state=True,
            is_in_prompt=True,
        )
        for token in range(NUM_PIECE_TOKENS)
    ]
    actual, expected = (concatenate_outputs([whole]), *piece_states), (concatenate_outputs(singles), *single_states)
    return _agree(actual, expected, _bound(layer))


def _supports_batches(layer: RecurrentLayer, arguments: dict[str, Any]) -> bool:
    num_tokens = _num_tokens(arguments)
    batch_states, single_states = _random_states(layer, 2), _random_states(layer, 2)
    tokens = [slice_tokens(arguments, num_tokens, token, token + 1) for token in (0, 2)]
    pair = {name: _stacked([token[name] for token in tokens]) for name in arguments}
    try:
        output, _ = layer.call(pair, batch_states, has_initial_state=True)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    singles = [
        layer.call(token, [state[row : row + 1] for state in single_states], has_initial_state=True)[0]
        for row, token in enumerate(tokens)
    ]
    return _agree((output, *batch_states), (_stacked(singles), *single_states), _bound(layer))


def _num_tokens(arguments: dict[str, Any]) -> int:
    first = next(iter(arguments.values()))
    return int(first.shape[1])


def _random_states(layer: RecurrentLayer, num_sequences: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(layer.number)
    device = next(layer.module.parameters()).device
    return [
        (torch.randn((num_sequences, *part.shape), generator=generator) * STATE_SIZE).to(device, part.dtype)
        for part in layer.state
    ]


def _stacked(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor) and values[0].dim() > 1:
        return torch.cat(values)
    if isinstance(values[0], tuple):
        return tuple(_stacked(list(column)) for column in zip(*values, strict=True))
    return values[0]


def _bound(layer: RecurrentLayer) -> float:
    dtypes = {parameter.dtype for parameter in layer.module.parameters()}
    return BOUND if dtypes == {torch.float32} else LOW_BOUND


def _agree(actual: Any, expected: Any, bound: float) -> bool:
    if isinstance(actual, tuple):
        return len(actual) == len(expected) and all(_agree(*pair, bound) for pair in zip(actual, expected, strict=True))
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return (
            actual is None or expected is None or isinstance(actual, torch.Tensor) == isinstance(expected, torch.Tensor)
        )
    if actual.shape != expected.shape:
        return False
    state_difference = difference(actual, expected)
    return state_difference.is_number and state_difference.overall <= bound
