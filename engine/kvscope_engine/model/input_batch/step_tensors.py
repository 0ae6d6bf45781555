"""Converts a step's arrays to the tensors that the model reads, through the step's input buffer.

Determines their order in the buffer. To avoid recompiling kernels, the number of columns of a block table is a multiple
of 16, and decodes and prefills have separate arrays, so that each array has the same alignment in every step.
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
"""The number of columns of a block table is a multiple of this. Triton recompiles kernels for row lengths that 16 does
not divide.
"""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Tensors that the model and its attention read in a step."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: tuple[torch.Tensor, ...]
    num_single_token: int
    decode: DecodeBatch | None
    prefill: PrefillBatch | None
    sample_rows: torch.Tensor | None
    """Batch rows whose logits are sampled; None if no row is sampled, or if all rows are sampled and there is no
    padding.
    """
    state_slots: torch.Tensor | None = None
    """State slot of each decode in a graph, shape (rows,), int64; None for models without recurrent layers."""


def stage_inputs(inputs: StepInputs, buffer: StepBuffer, size: int | None = None) -> StepTensors:
    """Write a step into the buffer, without padding for eager runs, or padded to `size` tokens for piecewise graphs."""
    count = inputs.num_single_token
    decode = prefill = None
    if size is None:
        slots = tuple(buffer.put(group_slots) for group_slots in inputs.slot_mapping)
        flat = buffer.put(inputs.input_ids), buffer.put(inputs.positions), slots
    else:
        flat = stage_padded(inputs, size, buffer, len(inputs.slot_mapping))
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
    has_sample_rows = 0 < len(inputs.sample_rows) < (size or 0) + inputs.num_tokens
    rows = buffer.put(inputs.sample_rows) if has_sample_rows else None
    return StepTensors(*flat, count, decode, prefill, rows)


def stage_decodes(
    inputs: StepInputs | None,
    size: int,
    length: int,
    block_tables: Sequence[torch.Tensor],
    buffer: StepBuffer,
    pad_state: int | None = None,
) -> tuple[StepTensors, list[torch.Tensor]]:
    """Write a step of decodes into the buffer, padded to `size` sequences of up to `length` tokens, for a CUDA graph.

    Padding sequences write to slot -1 and attend to nothing; without `inputs`, all are padding. If the model has
    recurrent layers, their state slot is `pad_state`, which belongs to no request. The graph reads the first rows of
    `block_tables`, one tensor per KV group.

    Returns the tensors that the graph reads, and the step's block tables as uploaded, only as wide as needed. The
    caller copies these into `block_tables` after the upload; entries after a sequence's last block are never read, so
    they need not be written.
    """
    count = 0 if inputs is None else len(inputs.seq_lens)
    assert inputs is None or inputs.num_single_token == count == inputs.num_tokens <= size, "only decodes are padded"
    flat = stage_padded(inputs, size, buffer, len(block_tables))
    lengths, seq_lens = buffer.reserve((size,), np.int32)
    lengths[count:] = 0
    state_slots = None
    if pad_state is not None:  # before the tables, whose width varies: a graph reads fixed addresses
        states, state_slots = buffer.reserve((size,), np.int64)
        states[count:] = pad_state
        if inputs is not None:
            states[:count] = inputs.state_slots
    tables = []
    if inputs is not None:
        lengths[:count] = inputs.seq_lens
        tables = [buffer.put(group_tables) for group_tables in inputs.block_tables]
    graph_tables = tuple(table[:size] for table in block_tables)
    return StepTensors(*flat, size, DecodeBatch(graph_tables, seq_lens, length), None, None, state_slots), tables


def stage_drafted(
    inputs: StepInputs | None,
    size: int,
    num_requests: int,
    max_query_len: int,
    length: int,
    block_tables: Sequence[torch.Tensor],
    buffer: StepBuffer,
) -> tuple[StepTensors, list[torch.Tensor]]:
    """Write a step of decodes with drafts into the buffer, padded to `size` tokens of `num_requests` sequences, for a
    CUDA graph.

    Each sequence has up to `max_query_len` tokens in the step and `length` in all. Returns the same as `stage_decodes`.

    All sequences are query runs whose lengths are read on the device. Padding sequences have no tokens, and padding
    tokens belong to no sequence: they write to no slot, and their rows of attention's output are never read.
    """
    count = 0 if inputs is None else len(inputs.seq_lens)
    assert count <= num_requests, "there are tables for so many"
    flat = stage_padded(inputs, size, buffer, len(block_tables))
    starts, query_start = buffer.reserve((num_requests + 1,), np.int32)
    lengths, seq_lens = buffer.reserve((num_requests,), np.int32)
    starts[count:] = 0 if inputs is None else inputs.num_tokens
    lengths[count:] = 0
    tables = []
    if inputs is not None:
        starts[:count], lengths[:count] = inputs.query_start[:-1], inputs.seq_lens
        tables = [buffer.put(group_tables) for group_tables in inputs.block_tables]
    graph_tables = tuple(table[:num_requests] for table in block_tables)
    runs = PrefillBatch(graph_tables, seq_lens, length, query_start, max_query_len)
    return StepTensors(*flat, 0, None, runs, None), tables


def stage_padded(
    inputs: StepInputs | None, size: int, buffer: StepBuffer, num_groups: int
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Write the token ids, the positions and, per KV group, the slots of a step into the buffer, each of shape (size,).

    Padding tokens write to slot -1; without `inputs`, all are padding.
    """
    count = 0 if inputs is None else inputs.num_tokens
    ids, input_ids = buffer.reserve((size,), np.int64)
    position_array, positions = buffer.reserve((size,), np.int64)
    ids[count:] = position_array[count:] = 0
    if inputs is not None:
        ids[:count], position_array[:count] = inputs.input_ids, inputs.positions
    slot_mapping = []
    for group in range(num_groups):
        slots, slot_tensor = buffer.reserve((size,), np.int64)
        slots[count:] = -1
        if inputs is not None:
            slots[:count] = inputs.slot_mapping[group]
        slot_mapping.append(slot_tensor)
    return input_ids, positions, tuple(slot_mapping)


def table_width(length: int, block_size: int) -> int:
    return -(-length // (block_size * WIDTH_STEP)) * WIDTH_STEP


def inputs_bytes(num_tokens: int, num_seqs: int, length: int, block_size: int, num_groups: int = 1) -> int:
    """Return the bytes of a buffer for the tensors of the largest step."""
    tables = [4 * num_seqs * table_width(length, block_size)] * num_groups
    flat = [8 * num_tokens] * (3 + num_groups)
    num_bytes = aligned_bytes(*flat, *tables, *[4 * (num_seqs + 1)] * 4, 8 * num_seqs)
    return num_bytes + aligned_bytes(1)  # one more alignment gap: decodes and prefills have separate arrays


def _tables(tables: NDArray[Any], buffer: StepBuffer) -> tuple[torch.Tensor, ...]:
    return tuple(_table(group_tables, buffer) for group_tables in tables)


def _table(tables: NDArray[Any], buffer: StepBuffer) -> torch.Tensor:
    if not buffer.is_on_device:
        return buffer.put(tables)
    width = -(-tables.shape[1] // WIDTH_STEP) * WIDTH_STEP
    array, tensor = buffer.reserve((len(tables), width), np.int32)
    array[:, : tables.shape[1]] = tables
    return tensor
