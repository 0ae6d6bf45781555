"""Recording of each layer's input and output by token, however tokens were batched.

Owns the hooks. A layer's input can be replaced by that of another run, so that a difference is due to one layer only:
rounding errors do not accumulate over layers and hide small faults.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import nn

Rows = dict[int, torch.Tensor]
"""A tensor (all tokens of the script, ...) by layer index."""


@dataclass(frozen=True, slots=True)
class LayerLocation:
    """Location of a layer in a model: the names of the decoder layer and of its attention."""

    layer: int
    decoder_layer: str
    attention: str
    is_recurrent: bool = False
    """Whether `attention` is a recurrent layer; `layer` is then its index among the recurrent layers."""


@dataclass(slots=True)
class Trace:
    """Recorded tensors of all tokens of a script. Layers that could not be observed are missing."""

    inputs: Rows = field(default_factory=dict)
    attended: Rows = field(default_factory=dict)
    """Outputs of attention modules, which fused layers do not call."""
    recurrent: Rows = field(default_factory=dict)
    """Outputs of recurrent layers, by the index among the recurrent layers."""
    heads: Rows = field(default_factory=dict)
    """Outputs of paged attention, (rows, heads, dim); empty for eager attention."""
    logits: torch.Tensor | None = None


class LayerTap:
    """Fills a `Trace` while the model runs. Set `rows` before each batch."""

    def __init__(self, num_rows: int, forced: Trace | None = None) -> None:
        self.trace = Trace()
        self.rows: list[list[int]] = []
        """For each sequence of the batch, the script rows of its tokens; further tokens are padding."""
        self._num_rows = num_rows
        self._forced = forced

    def record(self, tensors: Rows, layer: int, values: torch.Tensor) -> None:
        """Store `values`, (sequences, tokens, ...), of the current batch in `tensors`."""
        if layer not in tensors:
            tensors[layer] = values.new_zeros(self._num_rows, *values.shape[2:])
        for rows, values_of_sequence in zip(self.rows, values, strict=True):
            tensors[layer][rows] = values_of_sequence[: len(rows)]

    @contextmanager
    def attached(self, module: nn.Module, locations: Sequence[LayerLocation]) -> Iterator[None]:
        with ExitStack() as stack:
            for location in locations:
                for handle in self._hooks(module, location):
                    stack.callback(handle.remove)
            yield

    def _hooks(self, module: nn.Module, location: LayerLocation) -> Iterator[Any]:
        layer = number_of(location.decoder_layer) if location.is_recurrent else location.layer

        def before(submodule: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._replaced_input(layer, args, kwargs)

        def after(submodule: nn.Module, args: Any, output: Any) -> None:
            result = output[0] if isinstance(output, tuple) else output
            if self._fits(result):
                self.record(
                    self.trace.recurrent if location.is_recurrent else self.trace.attended, location.layer, result
                )

        yield module.get_submodule(location.attention).register_forward_hook(after)
        if location.decoder_layer != location.attention:
            yield module.get_submodule(location.decoder_layer).register_forward_pre_hook(before, with_kwargs=True)

    def _replaced_input(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values: Any = args[0] if args else kwargs.get("hidden_states")
        if not self._fits(values):
            return None
        self.record(self.trace.inputs, layer, values)
        forced = None if self._forced is None else self._forced.inputs.get(layer)
        if forced is None:
            return None
        replacement = torch.stack([forced[rows] for rows in self.rows]).to(values.dtype)
        return ((replacement, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": replacement})

    def _fits(self, values: Any) -> TypeGuard[torch.Tensor]:
        if not isinstance(values, torch.Tensor) or values.dim() != 3:
            return False
        return values.shape[:2] == (len(self.rows), max(map(len, self.rows)))


def nudged(trace: Trace, dtype: torch.dtype, seed: int) -> Trace:
    """Return a trace of the same layer inputs, with each number randomly moved up or down to a neighbour in `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for layer, values in trace.inputs.items():
        signs = torch.randint(0, 2, values.shape, generator=generator).to(values.device) * 2 - 1
        inputs[layer] = values.float() * (1 + signs * torch.finfo(dtype).eps)
    return Trace(inputs=inputs)


def decoder_layer_of(attention: str) -> str:
    """Return the prefix of `attention` up to its last number: `model.layers.3` for `model.layers.3.self_attn`.

    Returns `attention` itself if it has no number.
    """
    parts = attention.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else attention


def number_of(decoder_layer: str) -> int:
    """Return the number at the end of a layer name: 3 for `model.layers.3`; 0 if there is none."""
    last = decoder_layer.rpartition(".")[2]
    return int(last) if last.isdigit() else 0
