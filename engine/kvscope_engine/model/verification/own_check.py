"""Checks at load that a model run by its own code gives the same results with the paged cache as in a single call.

Three sequences run in interleaved chunks, over shuffled blocks with nonzero garbage, and are compared with a run of
each whole sequence without a cache. Each layer gets its input from the run without a cache. Windows are shortened to a
few tokens. With an indexer, the check is repeated with few selected tokens, so that some are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from kvscope_engine.model.kv_cache.kv_storage import KVStorage
from kvscope_engine.model.kv_cache.state_storage import StateStorage
from kvscope_engine.model.layers.own_forward import OwnBatch, OwnForward, own_forward
from kvscope_engine.model.tensor_agreement import difference
from kvscope_engine.model.verification.check_script import (
    NUM_BLOCKS,
    UNWRITTEN,
    CheckSequence,
    CheckStep,
    ScriptPiece,
    check_block_size,
    check_context,
    check_sequences,
)
from kvscope_engine.model.verification.eager_check import BOUNDS, LAYER_SLACK, LENGTHS, LOW_BOUND, short_windows
from kvscope_engine.model.verification.layer_trace import LayerLocation, LayerTap, Trace, decoder_layer_of
from kvscope_kernels import ops_for
from kvscope_telemetry.errors import BadInput

INDEXER_LIMITS: Final = ("index_topk",)
"""Names of config attributes with the number of tokens that an indexer selects (sparse attention)."""
MAX_OVERALL_DIFFERENCE: Final = 0.5
"""Bound on the difference of all tokens together, if three quarters of them are within the normal bound.

In 16-bit dtypes, one bit can change which token an indexer selects among tokens with almost equal scores, or which
expert is chosen. If the cache of a wrong sequence were read, the difference would be 1.4.
"""


@torch.inference_mode()
def check_own_forward(module: nn.Module) -> None:
    """Compare a run over the paged cache with a run without a cache, and set `supports_batches` on the model's
    `OwnForward`.

    Raises BadInput naming the first layer that differs.
    """
    own = own_forward(module)
    assert own is not None, "it is run by its own code"
    device = next(module.parameters()).device
    sequences = tuple(_with_positions_from_zero(sequence) for sequence in check_sequences(module.config, device))
    locations = _layer_locations(own)
    config: Any = module.config
    num_selected = min(getattr(config.get_text_config(decoder=True), name, math.inf) for name in INDEXER_LIMITS)
    is_exact = next(module.parameters()).dtype in BOUNDS and num_selected >= max(
        sequence.length for sequence in sequences
    )
    checks: list[tuple[tuple[str, ...], bool]] = [(LENGTHS, is_exact)]
    if own.has_indexer:
        checks.append(((*LENGTHS, *INDEXER_LIMITS), False))  # with few selected tokens
    for lengths, compares_all_tokens in checks:
        with short_windows(module, lengths), own.new_cache():
            whole = _whole_trace(module, sequences, locations)
            paged = _paged_trace(module, own, sequences, locations, whole)
            fault = _fault(paged, whole, compares_all_tokens)
            if fault:
                raise BadInput(f"its results for a prompt in pieces differ from those for the whole prompt ({fault})")
            if not own.supports_batches and lengths == LENGTHS:
                own.supports_batches = _supports_batches(module, own, sequences, locations, whole)


def _supports_batches(
    module: nn.Module,
    own: OwnForward,
    sequences: Sequence[CheckSequence],
    locations: Sequence[LayerLocation],
    whole: Trace,
) -> bool:
    """Whether decodes of several sequences, padded on the left, give correct results in one call."""
    own.supports_batches = True
    rows = [piece.sequence.first_row + piece.start for step in _steps(sequences)[-2:] for piece in step.pieces]
    # not the first token of the only piece with two tokens
    decode_rows = [row for row in rows if row != sequences[0].first_row + sequences[0].length - 3]
    try:
        return not _fault(_paged_trace(module, own, sequences, locations, whole), whole, True, decode_rows)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError):
        return False
    finally:
        own.supports_batches = False


def _with_positions_from_zero(sequence: CheckSequence) -> CheckSequence:
    """Return the sequence with positions from 0, since the model computes positions from the length of its cache."""
    positions = torch.arange(sequence.length, device=sequence.ids.device)
    return CheckSequence(sequence.ids, positions, sequence.first_row, sequence.table)


def _steps(sequences: Sequence[CheckSequence]) -> list[CheckStep]:
    first, second, third = sequences
    half, pieces_end = first.length // 2, first.length - 3
    steps = [
        CheckStep((ScriptPiece(first, 0, half), ScriptPiece(second, 0, second.length - 3))),
        CheckStep(
            (
                ScriptPiece(second, second.length - 3, second.length - 2),
                ScriptPiece(first, half, pieces_end),
                ScriptPiece(third, 0, third.length - 2),
            )
        ),
        CheckStep((_last(second, 2), _last(third, 2), ScriptPiece(first, pieces_end, first.length - 1))),
    ]
    return [*steps, CheckStep((_last(first, 1), _last(second, 1), _last(third, 1)))]


def _last(sequence: CheckSequence, number: int) -> ScriptPiece:
    return ScriptPiece(sequence, sequence.length - number, sequence.length - number + 1)


def _layer_locations(own: OwnForward) -> list[LayerLocation]:
    """Return the locations of layers that run once per call, so that their inputs can be replaced."""
    names = [layer.module for layer in own.layers]
    return [
        LayerLocation(number, decoder_layer_of(name), name)
        for number, name in enumerate(names)
        if name and names.count(name) == 1
    ]


def _whole_trace(module: Any, sequences: Sequence[CheckSequence], locations: Sequence[LayerLocation]) -> Trace:
    tap = LayerTap(sum(sequence.length for sequence in sequences))
    logits = []
    with tap.attached(module, locations):
        for sequence in sequences:
            tap.rows = [sequence.rows]
            logits.append(module(input_ids=sequence.ids[None], use_cache=False).logits[0])
    tap.trace.logits = torch.cat(logits)
    return tap.trace


def _paged_trace(
    module: nn.Module,
    own: OwnForward,
    sequences: Sequence[CheckSequence],
    locations: Sequence[LayerLocation],
    forced: Trace,
) -> Trace:
    parameter = next(module.parameters())
    device, dtype = parameter.device, parameter.dtype
    shapes = [layer.shape(dtype) for layer in own.layers]
    storage = KVStorage(NUM_BLOCKS, check_block_size(device), shapes, dtype, device)
    states = StateStorage(NUM_BLOCKS, own.states, device) if own.states else None
    for tensor in (*storage.block_tensors, *(states.slot_tensors if states is not None else ())):
        tensor.fill_(UNWRITTEN)
    tap = LayerTap(sum(sequence.length for sequence in sequences), forced)
    with tap.attached(module, locations):
        for step in _steps(sequences):
            context = check_context(step, storage, ops_for(device.type), states)
            ends = [0]
            for piece in step.pieces:
                ends.append(ends[-1] + piece.end - piece.start)
            context.own = OwnBatch(ends, [piece.end for piece in step.pieces], range(ends[-1]))
            rows = step.rows

            def set_rows(batch_rows: list[list[int]], rows: list[int] = rows) -> None:
                tap.rows = [[rows[row] for row in sequence] for sequence in batch_rows]

            own.row_watchers.append(set_rows)
            try:
                logits = own.run(step.gather("ids"), context, None)
            finally:
                own.row_watchers.clear()
            if tap.trace.logits is None:
                assert forced.logits is not None, "it was run whole"
                tap.trace.logits = torch.full_like(forced.logits, torch.nan)
            tap.trace.logits[rows] = logits
    storage.close()
    if states is not None:
        states.close()
    return tap.trace


def _fault(paged: Trace, whole: Trace, compares_all_tokens: bool, rows: list[int] | None = None) -> str:
    """Describe the first difference between the traces that is larger than rounding; empty if there is none.

    With `compares_all_tokens`, the difference of each token (of `rows`, if given) is bounded; otherwise, only that of
    three quarters of the tokens. If attention was recorded, only attention is compared in the first way, because in the
    parts after it one bit can change the expert.
    """
    assert paged.logits is not None, "a script computes logits"
    assert whole.logits is not None, "a script computes logits"
    bound = LAYER_SLACK * BOUNDS.get(paged.logits.dtype, LOW_BOUND)
    last = {max(whole.inputs, default=-1) + 1: whole.logits}
    for subject, actual, expected in (
        ("the attention of layer", paged.attended, whole.attended),
        ("the input of layer", paged.inputs, whole.inputs),
        ("the logits after layer", dict.fromkeys(last, paged.logits), last),
    ):
        for layer in sorted(actual.keys() & expected.keys()):
            selected = slice(None) if rows is None else rows
            gap = difference(actual[layer][selected], expected[layer][selected])
            is_strict = compares_all_tokens and (actual is paged.attended or not paged.attended)
            measured = gap.worst_row if is_strict else gap.upper_quartile
            if not (
                gap.is_number and measured <= bound and gap.overall <= (bound if is_strict else MAX_OVERALL_DIFFERENCE)
            ):
                return f"{subject} {layer} by {gap.overall:.3g} of its size, and by {gap.worst_row:.3g} for one token"
    return ""
