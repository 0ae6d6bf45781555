"""The proofs at load that paged attention gives what transformers' eager attention gives, in every layer.

Owns two comparisons over one script (`check_script`): eager against paged, and paged before the model's parts were
joined against after. A model that takes positions, masks or caches from elsewhere fails the first; a joined or packed
part that is not what it replaced fails the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from kvscope_engine.model.hf_config import position_limit
from kvscope_engine.model.kv_cache.kv_storage import KVStorage, LayerShape
from kvscope_engine.model.kv_cache.state_storage import StateStorage
from kvscope_engine.model.layers.attention.given_positions import given_positions
from kvscope_engine.model.layers.attention.paged_attention import ATTENTION_NAME, AttentionContext, AttentionOptions
from kvscope_engine.model.layers.recurrent.recurrent_layers import StateStep, recurrent_layers
from kvscope_engine.model.tensor_agreement import Difference, difference
from kvscope_engine.model.verification.check_script import (
    NUM_BLOCKS,
    SHORT_WINDOW,
    UNWRITTEN,
    CheckSequence,
    check_block_size,
    check_context,
    check_sequences,
    check_steps,
)
from kvscope_engine.model.verification.layer_trace import LayerPlace, LayerTap, Rows, Trace, decoder_layer_of
from kvscope_kernels import ops_for
from kvscope_kernels.rotate_write import Rotation
from kvscope_telemetry.errors import BadInput

BOUNDS: Final = {torch.float32: 3e-4, torch.float16: 4e-3}
LOW_BOUND: Final = 2e-2
"""Of what attention gives in one layer, by the type of its numbers, as a share of its size. Measured of sound models:
5e-6 in float32, 0.0011 in float16, 0.0086 in bfloat16; with a scale wrong by 5 %: 0.057 of a trained one."""
ROW_SLACK: Final = 7.0
"""A single token may be as much further off."""
LAYER_SLACK: Final = 3.0
"""And so may a whole layer, three tokens in four: the others may have gone to another expert."""
RECURRENT_SLACK: Final = 4.0
"""A recurrent layer sums over all tokens before it, in another order where they come in pieces: 0.021 in bfloat16."""
JOINED_SLACK: Final = 3.0
"""Joined layers round elsewhere; attention over sharp scores makes more of that."""
NUM_NUDGES: Final = 4
NUDGE_SLACK: Final = 3.0
"""Where experts attend, or scores are very sharp, a last bit of its input sends a token elsewhere. One token in four
may be so much further off than those that the layers move when their own inputs are nudged by a bit."""
NUDGE_LIMIT: Final = 0.5
"""But never more than this share of its size: of another layer's output it is 1.4."""

LENGTHS: Final = ("sliding_window", "attention_chunk_size", "floor_scale")
"""What says after how many tokens attention does something else; the last is of Llama 4's temperature."""


class DiffersError(BadInput):
    """Attention over blocks gives something else: a fault, and none to be got round by running the model otherwise."""


def check_equals_eager(module: nn.Module, layers: Sequence[LayerShape], places: Sequence[LayerPlace]) -> Trace | None:
    """Raises DiffersError naming the first layer that gives something else than transformers' eager attention.

    What each layer gives is returned, to be compared with; None where sliding windows were not the model's own.
    """
    sequences = check_sequences(module.config, next(module.parameters()).device)
    places = [*places, *_recurrent_places(module)]
    with short_windows(module) as is_shortened:
        eager = _eager_trace(module, sequences, places)
        paged = paged_trace(module, layers, places, forced=eager)
    fault = first_fault(paged, eager)
    if fault:
        raise DiffersError(f"paged attention does not give what eager attention gives ({fault})")
    return None if is_shortened else paged


def paged_trace(
    module: nn.Module, layers: Sequence[LayerShape], places: Sequence[LayerPlace], forced: Trace | None = None
) -> Trace:
    """The script on our attention; each layer is given what it was given in `forced`."""
    parameter = next(module.parameters())
    device, dtype = parameter.device, parameter.dtype
    sequences = check_sequences(module.config, device)
    storage = KVStorage(NUM_BLOCKS, check_block_size(device), layers, dtype, device)
    for tensor in storage.block_tensors:
        tensor.fill_(UNWRITTEN)
    recurrent = recurrent_layers(module)
    states = StateStorage(NUM_BLOCKS, recurrent.states, device) if recurrent.layers else None
    if states is not None:
        for tensor in states.slot_tensors:
            tensor.fill_(UNWRITTEN)
        places = [place for place in places if not place.is_recurrent] + _recurrent_places(module)
    tap = LayerTap(_num_rows(sequences), forced)
    ops = ops_for(device.type)
    with torch.inference_mode(), tap.attached(module, places):
        for step in check_steps(sequences):
            tap.rows = [step.rows]
            context = _WatchedContext(check_context(step, storage, ops, states), tap)
            ids, positions = step.gather("ids")[None], step.gather("positions")[None]
            logits = module(input_ids=ids, position_ids=positions, use_cache=False, paged=context).logits
            _keep_logits(tap, logits)
    storage.close()
    if states is not None:
        states.close()
    return tap.trace


def first_fault(actual: Trace, expected: Trace, slack: float = 1.0, moved: Sequence[Trace] = ()) -> str:
    """Where two traces differ by more than rounding, in words; nothing when they do not.

    `moved` are `actual` over inputs nudged by a last bit, when it is to be known how much that is.
    """
    bound = slack * BOUNDS.get(next(iter((actual.heads or actual.inputs).values())).dtype, LOW_BOUND)
    parts, wanted = _parts(actual), _parts(expected)
    nudges = [_parts(trace) for trace in moved]
    for words, (found, token_slack) in parts.items():
        own = _largest([difference(nudge[words][0][layer], found[layer]) for nudge in nudges for layer in found])
        for layer in sorted(found.keys() & wanted[words][0].keys()):
            apart = difference(found[layer], wanted[words][0][layer])
            if not (_is_small(apart, bound, token_slack) or _is_of_few(apart, bound, own)):
                return f"{words} {layer}: {apart.overall:.3g} of its size, {apart.worst_row:.3g} of a token's"
    return ""


def _parts(trace: Trace) -> dict[str, tuple[Rows, float]]:
    """What is compared, by name, and how many times the bound every token may be off; 0: of whole layers."""
    assert trace.logits is not None, "a script computes logits"
    return {
        "the attention of layer": (trace.attended, 1.0),
        "the output of recurrent layer": (trace.recurrent, RECURRENT_SLACK),
        "attention over blocks in layer": (trace.heads, 1.0),
        "the input of layer": (trace.inputs, 0.0),
        "the logits after layer": ({len(trace.inputs): trace.logits}, 0.0),
    }


def _largest(apart: Sequence[Difference]) -> Difference | None:
    if not apart:
        return None
    return max(apart, key=lambda one: one.overall)


def _is_of_few(apart: Difference, bound: float, own: Difference | None) -> bool:
    """Whether only few tokens are further off, and no further than a last bit sends some."""
    if own is None or not (apart.is_number and own.is_number):
        return False
    return apart.three_quarters <= bound and apart.overall <= min(NUDGE_SLACK * own.overall, NUDGE_LIMIT)


class _WatchedContext(AttentionContext):
    """Another, whose results are kept."""

    def __init__(self, context: AttentionContext, tap: LayerTap) -> None:
        self._context, self._tap = context, tap
        self.scratch = context.scratch
        self.states: StateStep | None = getattr(context, "states", None)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        out = self._context.attend(layer, query, key, value, options)
        self._tap.keep(self._tap.trace.heads, layer, out[None])
        return out

    def attend_fused(
        self,
        layer: int,
        heads: torch.Tensor,
        rotation: Rotation,
        options: AttentionOptions,
    ) -> torch.Tensor:
        out = self._context.attend_fused(layer, heads, rotation, options)
        self._tap.keep(self._tap.trace.heads, layer, out[None])
        return out


def _is_small(apart: Difference, bound: float, token_slack: float) -> bool:
    if not apart.is_number:
        return False
    if token_slack:
        return apart.overall <= token_slack * bound and apart.worst_row <= token_slack * ROW_SLACK * bound
    return apart.three_quarters <= LAYER_SLACK * bound


def _eager_trace(module: nn.Module, sequences: Sequence[CheckSequence], places: Sequence[LayerPlace]) -> Trace:
    """Whole sequences. The first is given no positions: what the model makes of that is what holds. The others come
    together, but where attention counts to one sequence's positions."""
    first, *others = sequences
    tap = LayerTap(_num_rows(sequences))
    if has_attention := recurrent_layers(module).has_attention:
        module.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        with torch.inference_mode(), tap.attached(module, places):
            tap.rows = [first.rows]
            _keep_logits(tap, module(input_ids=first.ids[None], use_cache=False).logits)
            for batch in [others] if given_positions(module) is None else [[sequence] for sequence in others]:
                tap.rows = [sequence.rows for sequence in batch]
                ids = pad_sequence([sequence.ids for sequence in batch], batch_first=True)
                steps = torch.arange(ids.shape[1], device=ids.device)
                positions = torch.stack([sequence.positions[0] + steps for sequence in batch])
                _keep_logits(tap, module(input_ids=ids, position_ids=positions, use_cache=False).logits)
    finally:
        if has_attention:
            module.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    return tap.trace


def _recurrent_places(module: nn.Module) -> list[LayerPlace]:
    return [
        LayerPlace(layer.number, decoder_layer_of(layer.name), layer.name, is_recurrent=True)
        for layer in recurrent_layers(module).layers
    ]


def _keep_logits(tap: LayerTap, logits: torch.Tensor) -> None:
    """Of tokens that a model never says, which have the least number there is (Chameleon's pictures), 0 is kept: beside
    that number no other would be seen."""
    logits = logits.masked_fill(logits <= torch.finfo(logits.dtype).min, 0)
    kept: Rows = {} if tap.trace.logits is None else {0: tap.trace.logits}
    tap.keep(kept, 0, logits)
    tap.trace.logits = kept[0]


def _num_rows(sequences: Sequence[CheckSequence]) -> int:
    return sum(sequence.length for sequence in sequences)


@contextmanager
def short_windows(module: nn.Module, lengths: Sequence[str] = LENGTHS) -> Iterator[bool]:
    """Sliding windows, chunks and steps of temperature, or what else has the names `lengths`, of a few tokens inside,
    wherever something says how long they are; whether there are any.

    One that is as long as the context is none, and stays as it is.
    """
    changed: list[tuple[Any, str, int]] = []
    config: Any = module.config
    limit = position_limit(config.get_text_config(decoder=True)) or math.inf
    for holder in {
        id(owner): owner for part in module.modules() for owner in (part, getattr(part, "config", None))
    }.values():
        for name in lengths:
            length = getattr(holder, name, None)
            if isinstance(length, int) and SHORT_WINDOW < length < limit:
                changed.append((holder, name, length))
                setattr(holder, name, SHORT_WINDOW)
    try:
        yield bool(changed)
    finally:
        for holder, name, length in changed:
            setattr(holder, name, length)
