"""Installs LoRA stacks on a model's linear layers, after all checks of the model.

Finds each linear layer of the original model in the loaded one, where it is unchanged or part of a fused layer. A run
of a few tokens determines whether each layer is called. A layer whose weights are read directly instead cannot have a
delta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from kvscope_engine.model.layers.attention.no_attention import NoAttention
from kvscope_engine.model.layers.attention.paged_attention import AttentionContext
from kvscope_engine.model.layers.forward import Forward
from kvscope_engine.model.layers.fused.fused_attention import FusedAttention, PositionEmbeddings
from kvscope_engine.model.layers.fused.fused_layer import FusedLayer, LayerRunner
from kvscope_engine.model.layers.fused.fused_mlp import FusedMLP
from kvscope_engine.model.layers.fused.grouped_linear import GroupedLinear
from kvscope_engine.model.layers.fused.int8_linear import Int8Linear
from kvscope_engine.model.layers.fused.packed_linear import PackedLinear
from kvscope_engine.model.layers.lora.lora_linear import LoraLinear, LoraStack, LoraStepState, OutputSlice, StepSlots
from kvscope_engine.model.layers.recurrent.recurrent_layers import recurrent_layers

NUM_TOKENS: Final = 5
_LINEARS: Final = (nn.Linear, PackedLinear, GroupedLinear, Int8Linear)
_FUSED: Final = "kvscope_fused"


class DeltaTarget(NamedTuple):
    """Location of a linear layer's delta: a stack, and the index of the layer in `LoraStack.parts`."""

    stack: LoraStack
    part: int

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and of inputs of the linear layer."""
        return self.stack.parts[self.part].size, int(self.stack.a.shape[-1])


class _Site(NamedTuple):
    """A possibly fused linear layer that the model calls, and the layers of the original model that it contains."""

    parent: nn.Module
    attribute: str
    parts: tuple[OutputSlice, ...]


class _SkippedWithLora:
    """Wrapper of a compiled layer, which does not support LoRA, that runs it only in steps without adapters."""

    def __init__(self, compiled: LayerRunner, step_state: LoraStepState) -> None:
        self._compiled, self._step_state = compiled, step_state

    def run(
        self,
        x: torch.Tensor,
        normed: torch.Tensor | None,
        position_embeddings: PositionEmbeddings,
        paged: AttentionContext,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        return None if self._step_state.slots is not None else self._compiled.run(x, normed, position_embeddings, paged)


def layer_names(module: nn.Module) -> frozenset[str]:
    """Return the names, in the original model, of the linear layers that can have deltas."""
    return frozenset(part.name for site in _sites(module) for part in site.parts)


def install(
    module: nn.Module, is_selected: Callable[[str], bool], num_slots: int, max_rank: int, like: torch.Tensor
) -> tuple[LoraStepState, dict[str, DeltaTarget]]:
    """Add `num_slots` LoRA slots to the selected layers, in place. Dtype and device are those of `like`.

    Returns:
        The state of a step that all LoRA layers share, and the target of each layer's delta by the layer's name.
    """
    step_state = LoraStepState(recurrent_layers(module).call_rows)
    installed: list[tuple[_Site, LoraLinear]] = []
    for site in list(_sites(module)):
        parts = [part for part in site.parts if is_selected(part.name)]
        if parts:
            linear: Any = getattr(site.parent, site.attribute)
            stack = LoraStack(parts, linear.weight.shape[1], num_slots, max_rank, like)
            lora = LoraLinear(linear, stack, step_state)
            setattr(site.parent, site.attribute, lora)
            installed.append((site, lora))
    for layer in [getattr(part, _FUSED, None) for part in module.modules()]:
        if isinstance(layer, FusedLayer) and layer.compiled is not None:
            layer.compiled = _SkippedWithLora(layer.compiled, step_state)
    _trial_run(module, step_state, like.device)
    targets: dict[str, DeltaTarget] = {}
    for site, lora in installed:
        if not lora.was_called:
            setattr(site.parent, site.attribute, lora.linear)
            continue
        targets |= {
            part.name: DeltaTarget(lora.lora_stack, number) for number, part in enumerate(lora.lora_stack.parts)
        }
    return step_state, targets


def _sites(module: Any) -> Iterator[_Site]:
    head = module.get_output_embeddings()
    for name, part in module.named_modules():
        if _FUSED in name.split("."):
            continue
        fused = getattr(part, _FUSED, None)
        if isinstance(fused, FusedAttention):
            counts = fused.num_query_heads, fused.num_kv_heads, fused.num_kv_heads
            sizes = [count * fused.head_dim for count in counts]
            yield _site(fused, "qkv", name, ("q_proj", "k_proj", "v_proj"), sizes)
            yield _site(fused, "o", name, ("o_proj",), [int(fused.o.weight.shape[0])])
        elif isinstance(fused, FusedMLP):
            yield _site(fused, "gate_up", name, ("gate_proj", "up_proj"), [fused.size, fused.size])
            yield _site(fused, "down", name, ("down_proj",), [int(fused.down.weight.shape[0])])
        for child_name, child in list(part.named_children()):
            if type(child) in _LINEARS and child is not head and child_name != _FUSED:
                yield _site(part, child_name, name, (child_name,), [int(child.weight.shape[0])])


def _site(parent: nn.Module, attribute: str, prefix: str, names: Sequence[str], sizes: Sequence[int]) -> _Site:
    parts, start = [], 0
    for name, size in zip(names, sizes, strict=True):
        parts.append(OutputSlice(f"{prefix}.{name}", start, size))
        start += size
    return _Site(parent, attribute, tuple(parts))


@torch.inference_mode()
def _trial_run(module: nn.Module, step_state: LoraStepState, device: torch.device) -> None:
    positions = torch.arange(NUM_TOKENS, device=device)
    step_state.slots = StepSlots(0, 1, None)
    try:
        Forward(module).fill(positions + 1, positions, NoAttention())
    finally:
        step_state.slots = None
