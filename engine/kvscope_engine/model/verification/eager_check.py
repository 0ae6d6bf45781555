"""Checks at load that paged attention gives the same results as transformers' eager attention, in every layer.

Makes two comparisons with the sequences of `check_script`: eager attention with paged attention, and paged attention
before the model's parts are fused with paged attention after that. A model that computes positions, masks or caches in
its own code fails the first; a fused or packed part that is not equivalent fails the second.
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
from kvscope_engine.model.layers.attention.paged_attention import ATTENTION_NAME, AttentionContext, AttentionOptions
from kvscope_engine.model.layers.attention.position_cache import position_cache
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
from kvscope_engine.model.verification.layer_trace import LayerLocation, LayerTap, Rows, Trace, decoder_layer_of
from kvscope_kernels import ops_for
from kvscope_kernels.rotate_write import Rotation
from kvscope_telemetry.errors import BadInput

BOUNDS: Final = {torch.float32: 3e-4, torch.float16: 4e-3}
LOW_BOUND: Final = 2e-2
"""Bound for dtypes that are not in `BOUNDS`.

Bounds apply to the difference of attention in a layer, relative to its norm.

Measured for correct models: 5e-6 in float32, 0.0011 in float16, 0.0086 in bfloat16. With a scale wrong by 5 %, a
trained model has 0.057.
"""
ROW_SLACK: Final = 7.0
"""Factor by which the bound is larger for a single token than for all tokens together."""
LAYER_SLACK: Final = 3.0
"""Factor of the bound for a whole layer's output. The bound is applied to the upper quartile of the tokens'
differences.

The tokens above the upper quartile are not bounded, because they may have been routed to another expert.
"""
RECURRENT_SLACK: Final = 4.0
"""Factor of the bound for recurrent layers. They sum over all previous tokens, in another order if computed in chunks.

Measured: 0.021 in bfloat16.
"""
FUSED_SLACK: Final = 3.0
"""Factor of the bound for fused layers, which round at other points; attention with sharp scores amplifies that."""
NUM_NUDGES: Final = 4
NUDGE_SLACK: Final = 3.0
"""Limit on the difference of a layer of which at most a quarter of the tokens exceed the normal bound, as a multiple of
the difference that a one-bit change of the layer's input causes.

With experts, or very sharp scores, one bit of the input can change the expert or the token attended to.
"""
NUDGE_LIMIT: Final = 0.5
"""Upper limit of the differences accepted because of one-bit changes, relative to the norm.

The output of a wrong layer would differ by 1.4.
"""

LENGTHS: Final = ("sliding_window", "attention_chunk_size", "floor_scale")
"""Config attributes with a number of tokens beyond which attention changes; `floor_scale` is that of Llama 4's
temperature.
"""


class DiffersError(BadInput):
    """Paged attention gives another result than eager attention. That is a bug in kvscope.

    Unlike a model that kvscope's attention does not support, such a model is refused and not run with its own forward
    code.
    """


def check_equals_eager(
    module: nn.Module, layers: Sequence[LayerShape], locations: Sequence[LayerLocation]
) -> Trace | None:
    """Compare paged with eager attention.

    Returns the trace of all layers for later comparisons, or None if sliding windows were shortened for the check.

    Raises:
        DiffersError: A layer differs. The message names the first one.
    """
    sequences = check_sequences(module.config, next(module.parameters()).device)
    locations = [*locations, *_recurrent_locations(module)]
    with short_windows(module) as is_shortened:
        eager = _eager_trace(module, sequences, locations)
        paged = paged_trace(module, layers, locations, forced=eager)
    fault = first_fault(paged, eager)
    if fault:
        raise DiffersError(f"the results of paged attention differ from those of eager attention ({fault})")
    return None if is_shortened else paged


def paged_trace(
    module: nn.Module, layers: Sequence[LayerShape], locations: Sequence[LayerLocation], forced: Trace | None = None
) -> Trace:
    """Run the check's sequences with paged attention and return the trace. Each layer gets its input from
    `forced`, if given.
    """
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
        locations = [location for location in locations if not location.is_recurrent] + _recurrent_locations(module)
    tap = LayerTap(_num_rows(sequences), forced)
    ops = ops_for(device.type)
    with torch.inference_mode(), tap.attached(module, locations):
        for step in check_steps(sequences):
            tap.rows = [step.rows]
            context = _WatchedContext(check_context(step, storage, ops, states), tap)
            ids, positions = step.gather("ids")[None], step.gather("positions")[None]
            logits = module(input_ids=ids, position_ids=positions, use_cache=False, paged=context).logits
            _record_logits(tap, logits)
    storage.close()
    if states is not None:
        states.close()
    return tap.trace


def first_fault(actual: Trace, expected: Trace, slack: float = 1.0, nudged_traces: Sequence[Trace] = ()) -> str:
    """Describe the first difference between two traces that is larger than rounding; empty if there is none.

    `nudged_traces` are traces like `actual` with inputs changed by one bit. They measure the effect of such a change.
    """
    bound = slack * BOUNDS.get(next(iter((actual.heads or actual.inputs).values())).dtype, LOW_BOUND)
    parts, expected_parts = _parts(actual), _parts(expected)
    nudges = [_parts(trace) for trace in nudged_traces]
    for label, (tensors, token_slack) in parts.items():
        nudge_difference = _largest(
            [difference(nudge[label][0][layer], tensors[layer]) for nudge in nudges for layer in tensors]
        )
        for layer in sorted(tensors.keys() & expected_parts[label][0].keys()):
            measured = difference(tensors[layer], expected_parts[label][0][layer])
            if not (_is_small(measured, bound, token_slack) or _is_few_tokens(measured, bound, nudge_difference)):
                return (
                    f"{label} {layer} by {measured.overall:.3g} of its size, and by {measured.worst_row:.3g} for one "
                    "token"
                )
    return ""


def _parts(trace: Trace) -> dict[str, tuple[Rows, float]]:
    """Return the compared tensors by label, each with a factor of the bound.

    The factor is 0 if tensors are compared only as a whole, without a bound for single tokens.
    """
    assert trace.logits is not None, "a script computes logits"
    return {
        "the attention of layer": (trace.attended, 1.0),
        "the output of recurrent layer": (trace.recurrent, RECURRENT_SLACK),
        "attention over blocks in layer": (trace.heads, 1.0),
        "the input of layer": (trace.inputs, 0.0),
        "the logits after layer": ({len(trace.inputs): trace.logits}, 0.0),
    }


def _largest(differences: Sequence[Difference]) -> Difference | None:
    if not differences:
        return None
    return max(differences, key=lambda item: item.overall)


def _is_few_tokens(measured: Difference, bound: float, nudge_difference: Difference | None) -> bool:
    """Whether at most a quarter of the tokens differ more than `bound`, and the difference of all tokens
    together is not much larger than that caused by a one-bit change of the input.
    """
    if nudge_difference is None or not (measured.is_number and nudge_difference.is_number):
        return False
    return measured.upper_quartile <= bound and measured.overall <= min(
        NUDGE_SLACK * nudge_difference.overall, NUDGE_LIMIT
    )


class _WatchedContext(AttentionContext):
    def __init__(self, context: AttentionContext, tap: LayerTap) -> None:
        self._context, self._tap = context, tap
        self.scratch = context.scratch
        self.states: StateStep | None = getattr(context, "states", None)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        out = self._context.attend(layer, query, key, value, options)
        self._tap.record(self._tap.trace.heads, layer, out[None])
        return out

    def attend_fused(
        self,
        layer: int,
        heads: torch.Tensor,
        rotation: Rotation,
        options: AttentionOptions,
    ) -> torch.Tensor:
        out = self._context.attend_fused(layer, heads, rotation, options)
        self._tap.record(self._tap.trace.heads, layer, out[None])
        return out


def _is_small(measured: Difference, bound: float, token_slack: float) -> bool:
    if not measured.is_number:
        return False
    if token_slack:
        return measured.overall <= token_slack * bound and measured.worst_row <= token_slack * ROW_SLACK * bound
    return measured.upper_quartile <= LAYER_SLACK * bound


def _eager_trace(module: nn.Module, sequences: Sequence[CheckSequence], locations: Sequence[LayerLocation]) -> Trace:
    """Run whole sequences with eager attention.

    The first sequence runs without positions, so that the positions that the model computes itself are the reference.
    The other sequences run as one batch, or separately if the model's attention computes positions by counting tokens.
    """
    first, *others = sequences
    tap = LayerTap(_num_rows(sequences))
    if has_attention := recurrent_layers(module).has_attention:
        module.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        with torch.inference_mode(), tap.attached(module, locations):
            tap.rows = [first.rows]
            _record_logits(tap, module(input_ids=first.ids[None], use_cache=False).logits)
            for batch in [others] if position_cache(module) is None else [[sequence] for sequence in others]:
                tap.rows = [sequence.rows for sequence in batch]
                ids = pad_sequence([sequence.ids for sequence in batch], batch_first=True)
                steps = torch.arange(ids.shape[1], device=ids.device)
                positions = torch.stack([sequence.positions[0] + steps for sequence in batch])
                _record_logits(tap, module(input_ids=ids, position_ids=positions, use_cache=False).logits)
    finally:
        if has_attention:
            module.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    return tap.trace


def _recurrent_locations(module: nn.Module) -> list[LayerLocation]:
    return [
        LayerLocation(layer.number, decoder_layer_of(layer.name), layer.name, is_recurrent=True)
        for layer in recurrent_layers(module).layers
    ]


def _record_logits(tap: LayerTap, logits: torch.Tensor) -> None:
    """Record logits in the trace of `tap`.

    Chameleon's logits of image tokens, which it never generates, are the dtype's minimum. 0 is recorded for them,
    because that number would dominate any difference.
    """
    logits = logits.masked_fill(logits <= torch.finfo(logits.dtype).min, 0)
    logits_rows: Rows = {} if tap.trace.logits is None else {0: tap.trace.logits}
    tap.record(logits_rows, 0, logits)
    tap.trace.logits = logits_rows[0]


def _num_rows(sequences: Sequence[CheckSequence]) -> int:
    return sum(sequence.length for sequence in sequences)


@contextmanager
def short_windows(module: nn.Module, lengths: Sequence[str] = LENGTHS) -> Iterator[bool]:
    """Return a context in which sliding windows, chunks and temperature steps (attributes `lengths`) are a few tokens
    long.

    Yields whether any were changed. Lengths not below the context length have no effect and are not changed.
    """
    changed: list[tuple[Any, str, int]] = []
    config: Any = module.config
    limit = position_limit(config.get_text_config(decoder=True)) or math.inf
    for holder in {
        id(owner): owner for submodule in module.modules() for owner in (submodule, getattr(submodule, "config", None))
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
