"""A step's arrays as the tensors that the model is run on, by way of the step's buffer.

Owns their order in the buffer and the rule that keeps kernels from being compiled twice: tables are a multiple of 16
wide, and decodes and prefills have arrays of their own, so that each starts at the same alignment in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.device_memory.step_buffer import StepBuffer, aligned_bytes
from kvscope_engine.model.input_batch.step_inputs import StepInputs
from kvscope_engine.model.layers.attention.paged_attention import DecodeBatch, PrefillBatch
from kvscope_kernels.host_lengths import HostLengths

WIDTH_STEP: Final = 16
"""Columns: Triton compiles a kernel again for a row length that 16 does not divide."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What the model and its attention read."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: tuple[torch.Tensor, ...]
    num_single_token: int
    decode: DecodeBatch | None
    prefill: PrefillBatch | None
    sample_rows: torch.Tensor | None
    """None when none is sampled, or every row is and none was added."""
    state_slots: torch.Tensor | None = None
    """(rows,) int64, of decodes in a graph: where the state of each is; None for models that keep none."""


def put_inputs(inputs: StepInputs, buffer: StepBuffer, size: int | None = None) -> StepTensors:
    """A step as it is, for running eagerly; or with its tokens padded to `size`, what graphs between attention read."""
    count = inputs.num_single_token
    decode = prefill = None
    if size is None:
        slots = tuple(buffer.put(of_group) for of_group in inputs.slot_mapping)
        flat = buffer.put(inputs.input_ids), buffer.put(inputs.positions), slots
    else:
        flat = put_padded(inputs, size, buffer, len(inputs.slot_mapping))
    if count:
        tables, seq_lens = _tables(inputs.block_tables[:, :count], buffer), buffer.put(inputs.seq_lens[:count])
        decode = DecodeBatch(tables, seq_lens, int(inputs.seq_lens[:count].max()))
    if count < len(inputs.seq_lens):
        query_start = inputs.query_start[count:] - inputs.query_start[count]
        prefill = PrefillBatch(
            block_tables=_tables(inputs.block_tables[:, count:], buffer),
            seq_lens=buffer.put(inputs.seq_lens[count:]),
            max_seq_len=int(inputs.seq_lens[count:].max()),
            query_start=buffer.put(query_start),
            max_query_len=int(np.diff(query_start).max()),
            lengths=HostLengths(query_start, inputs.seq_lens[count:]),
        )
    is_some = 0 < len(inputs.sample_rows) < (size or 0) + inputs.num_tokens
    rows = buffer.put(inputs.sample_rows) if is_some else None
    return StepTensors(*flat, count, decode, prefill, rows)


def put_decodes(
    inputs: StepInputs | None,
    size: int,
    length: int,
    block_tables: Sequence[torch.Tensor],
    buffer: StepBuffer,
    pad_state: int | None = None,
) -> tuple[StepTensors, list[torch.Tensor]]:
    """A step of decodes alone, padded to `size` sequences of up to `length` tokens: what one graph reads.

    Sequences that are added write nowhere (slot -1) and attend to nothing; without `inputs` all are of that kind. Where
    the model keeps states theirs is `pad_state`, which is nobody's. Tables are read from the first rows of
    `block_tables`, one a KV group. What belongs there comes second, as wide as it is, to be copied once it is sent:
    nothing behind a sequence's last block is ever read, so it need not be written.
    """
    count = 0 if inputs is None else len(inputs.seq_lens)
    assert inputs is None or inputs.num_single_token == count == inputs.num_tokens <= size, "only decodes are padded"
    flat = put_padded(inputs, size, buffer, len(block_tables))
    lengths, seq_lens = buffer.reserve((size,), np.int32)
    lengths[count:] = 0
    state_slots = None
    if pad_state is not None:  # before the tables, which are of another width in each step: a graph reads fixed places
        states, state_slots = buffer.reserve((size,), np.int64)
        states[count:] = pad_state
        if inputs is not None:
            states[:count] = inputs.state_slots
    tables = []
    if inputs is not None:
        lengths[:count] = inputs.seq_lens
        tables = [buffer.put(of_group) for of_group in inputs.block_tables]
    read = tuple(table[:size] for table in block_tables)
    return StepTensors(*flat, size, DecodeBatch(read, seq_lens, length), None, None, state_slots), tables


def put_drafted(
    inputs: StepInputs | None,
    size: int,
    num_requests: int,
    max_query_len: int,
    length: int,
    block_tables: Sequence[torch.Tensor],
    buffer: StepBuffer,
) -> tuple[StepTensors, list[torch.Tensor]]:
    """A step of decodes and drafts, padded to `size` tokens of `num_requests` sequences, each with up to
    `max_query_len` of them and `length` in all: what one graph reads. The second is as in `put_decodes`.

    All are runs of queries, whose lengths are read on the device. Sequences that are added have no tokens, and tokens
    that are added no sequence: they write nowhere, and what attention leaves in their rows nobody reads.
    """
    count = 0 if inputs is None else len(inputs.seq_lens)
    assert count <= num_requests, "there are tables for so many"
    flat = put_padded(inputs, size, buffer, len(block_tables))
    starts, query_start = buffer.reserve((num_requests + 1,), np.int32)
    lengths, seq_lens = buffer.reserve((num_requests,), np.int32)
    starts[count:] = 0 if inputs is None else inputs.num_tokens
    lengths[count:] = 0
    tables = []
    if inputs is not None:
        starts[:count], lengths[:count] = inputs.query_start[:-1], inputs.seq_lens
        tables = [buffer.put(of_group) for of_group in inputs.block_tables]
    read = tuple(table[:num_requests] for table in block_tables)
    runs = PrefillBatch(read, seq_lens, length, query_start, max_query_len)
    return StepTensors(*flat, 0, None, runs, None), tables


def put_padded(
    inputs: StepInputs | None, size: int, buffer: StepBuffer, num_groups: int
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Ids, positions and, in each KV group, slots of a step, (size,) each.

    Tokens that are added write nowhere (slot -1); without `inputs` all are of that kind.
    """
    count = 0 if inputs is None else inputs.num_tokens
    ids, input_ids = buffer.reserve((size,), np.int64)
    places, positions = buffer.reserve((size,), np.int64)
    ids[count:] = places[count:] = 0
    if inputs is not None:
        ids[:count], places[:count] = inputs.input_ids, inputs.positions
    slot_mapping = []
    for group in range(num_groups):
        slots, of_group = buffer.reserve((size,), np.int64)
        slots[count:] = -1
        if inputs is not None:
            slots[:count] = inputs.slot_mapping[group]
        slot_mapping.append(of_group)
    return input_ids, positions, tuple(slot_mapping)


def table_width(length: int, block_size: int) -> int:
    """Columns of a table for `length` tokens."""
    return -(-length // (block_size * WIDTH_STEP)) * WIDTH_STEP


def inputs_bytes(num_tokens: int, num_seqs: int, length: int, block_size: int, num_groups: int = 1) -> int:
    """Bytes of the largest step's tensors in a buffer."""
    tables = [4 * num_seqs * table_width(length, block_size)] * num_groups
    flat = [8 * num_tokens] * (3 + num_groups)
    each = aligned_bytes(*flat, *tables, *[4 * (num_seqs + 1)] * 4, 8 * num_seqs)
    return each + aligned_bytes(1)  # decodes and prefills begin arrays of their own


def _tables(tables: NDArray[Any], buffer: StepBuffer) -> tuple[torch.Tensor, ...]:
    return tuple(_table(of_group, buffer) for of_group in tables)


def _table(tables: NDArray[Any], buffer: StepBuffer) -> torch.Tensor:
    if not buffer.is_on_device:
        return buffer.put(tables)
    width = -(-tables.shape[1] // WIDTH_STEP) * WIDTH_STEP
    array, tensor = buffer.reserve((len(tables), width), np.int32)
    array[:, : tables.shape[1]] = tables
    return tensor
