"""Script of the checks at load: a few short sequences, in chunks, over shuffled blocks, some at high positions.

Owns the sequences, the order of their chunks, and their blocks. Must not depend on models or comparisons.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from kvscope_engine.model.hf_config import FIRST_POSITION, position_limit
from kvscope_engine.model.kv_cache.kv_storage import KVStorage
from kvscope_engine.model.kv_cache.state_storage import StateStorage
from kvscope_engine.model.layers.attention.paged_attention import DecodeBatch, PagedContext, PrefillBatch
from kvscope_engine.model.layers.recurrent.recurrent_layers import StateBatch
from kvscope_kernels import Ops
from kvscope_kernels.host_lengths import HostLengths

CPU_BLOCK_SIZE: Final = 8
GPU_BLOCK_SIZE: Final = 16
"""Block size of the checks on a GPU: the default, for which kernels are compiled anyway."""
NUM_BLOCKS: Final = 8
TABLES: Final = ((5, 1, 6), (2, 7, 4), (3,))
"""Block table of each sequence. Block 0 belongs to no sequence."""
SHORT_WINDOW: Final = 6
"""Length of sliding windows in the checks, in tokens, shorter than the sequences."""
UNWRITTEN: Final = 64.0
"""Value of KV slots that were never written. An implementation that reads such a slot gives a clearly wrong
result. If it masks the slot by multiplying it by zero, the result is right, which would not be the case with
NaN.
"""
UNKNOWN_LIMIT: Final = 4096


@dataclass(frozen=True, slots=True)
class CheckSequence:
    """Tokens and their positions, both (length,), and the index of their first row among all tokens of the script."""

    ids: torch.Tensor
    positions: torch.Tensor
    first_row: int
    table: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def rows(self) -> list[int]:
        return list(range(self.first_row, self.first_row + self.length))


@dataclass(frozen=True, slots=True)
class ScriptPiece:
    """Tokens `start` to `end` (exclusive) of a sequence, computed in one step."""

    sequence: CheckSequence
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CheckStep:
    """A flattened batch of pieces, single tokens first."""

    pieces: tuple[ScriptPiece, ...]

    @property
    def num_single_token(self) -> int:
        return sum(piece.end - piece.start == 1 for piece in self.pieces)

    def gather(self, name: str) -> torch.Tensor:
        """Return the sequences' attribute `name` (`ids` or `positions`) for the step's tokens, concatenated, (T,)."""
        parts = [getattr(piece.sequence, name)[piece.start : piece.end] for piece in self.pieces]
        return torch.cat(parts)

    @property
    def rows(self) -> list[int]:
        """Row of each token among all tokens of the script."""
        return [p.sequence.first_row + index for p in self.pieces for index in range(p.start, p.end)]


def check_block_size(device: torch.device) -> int:
    """Return the block size of the checks, small on CPUs, where each token takes time."""
    return CPU_BLOCK_SIZE if device.type == "cpu" else GPU_BLOCK_SIZE


def check_sequences(config: Any, device: torch.device) -> tuple[CheckSequence, ...]:
    """Create sequences at position 0, at the model's last positions, and across the start of position scaling."""
    text_config = config.get_text_config(decoder=True)
    limit = position_limit(text_config) or UNKNOWN_LIMIT
    size = check_block_size(device)
    lengths = [min(length, limit) for length in (2 * size + 3, 2 * size + 2, 4)]
    scaling_start = _original_limit(text_config) or limit // 2
    starts = (0, limit - lengths[1], min(max(scaling_start - lengths[2] // 2, 0), max(limit - lengths[1], 0)))
    sequences, row = [], 0
    for index, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        ids = (torch.arange(1, length + 1, device=device) * 37 + 11 + 101 * index) % int(text_config.vocab_size)
        if first := getattr(text_config, FIRST_POSITION, 0):  # such models do not count padding tokens; text has none
            ids = ids.where(ids != first - 1, first)
        positions = torch.arange(start, start + length, device=device)
        sequences.append(CheckSequence(ids, positions, row, TABLES[index]))
        row += length
    return tuple(sequences)


def check_steps(sequences: tuple[CheckSequence, ...]) -> Iterator[CheckStep]:
    """Yield two steps. The first has the prefills of two sequences, one of them partial. The second has a decode, the
    rest of the partial prefill, and a whole third sequence.

    There are only two steps, because each step reads all weights.
    """
    first, second, third = sequences
    half, last = first.length // 2, second.length - 1
    yield CheckStep((ScriptPiece(first, 0, half), ScriptPiece(second, 0, last)))
    yield CheckStep(
        (
            ScriptPiece(second, last, last + 1),
            ScriptPiece(first, half, first.length),
            ScriptPiece(third, 0, third.length),
        )
    )


def check_context(step: CheckStep, storage: KVStorage, ops: Ops, states: StateStorage | None = None) -> PagedContext:
    """Create the attention context of a step, with the tensors that the runner would create."""
    count, device = step.num_single_token, storage.device
    width = max(len(table) for table in (*TABLES, *(piece.sequence.table for piece in step.pieces)))
    tables = torch.tensor(
        [[*piece.sequence.table, *[0] * (width - len(piece.sequence.table))] for piece in step.pieces],
        dtype=torch.int32,
        device=device,
    )
    ends = [piece.end for piece in step.pieces]
    lens = torch.tensor(ends, dtype=torch.int32, device=device)
    sizes = [piece.end - piece.start for piece in step.pieces[count:]]
    starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    decode = DecodeBatch((tables[:count],), lens[:count], max(ends[:count])) if count else None
    prefill = None
    if sizes:
        query_start = torch.tensor(starts, dtype=torch.int32, device=device)
        host_lengths = HostLengths(np.array(starts, np.int32), np.array(ends[count:], np.int32))
        prefill = PrefillBatch(
            (tables[count:],), lens[count:], max(ends[count:]), query_start, max(sizes), host_lengths
        )
    slots = torch.tensor([_slot(p, index, storage.block_size) for p in step.pieces for index in range(p.start, p.end)])
    context = PagedContext(storage, ops, (slots.to(device),), count, decode, prefill)
    if states is not None:
        context.states = _check_states(step, states)
    return context


def _check_states(step: CheckStep, states: StateStorage) -> StateBatch:
    """Return the recurrent states of the sequences. A sequence's state slot is the number of its first block."""
    slots = [piece.sequence.table[0] for piece in step.pieces]
    sizes = [piece.end - piece.start for piece in step.pieces]
    starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    has_initial_state = [piece.start > 0 for piece in step.pieces]
    return StateBatch(states, slots, has_initial_state, starts, in_prompt=[True] * len(slots))


def far_positions(config: Any) -> tuple[int, ...]:
    """Return a position at the start of position scaling, one at about twice that, and the model's last position."""
    text_config = config.get_text_config(decoder=True)
    limit = position_limit(text_config) or UNKNOWN_LIMIT
    scaling_start = _original_limit(text_config) or limit // 2
    return tuple(min(position, limit - 1) for position in (scaling_start, 2 * scaling_start + 1, limit - 1))


def _slot(piece: ScriptPiece, index: int, block_size: int) -> int:
    return piece.sequence.table[index // block_size] * block_size + index % block_size


def _original_limit(config: Any) -> int | None:
    """Return the position from which rotary embeddings or queries are scaled; None if unknown."""
    parameters = getattr(config, "rope_parameters", None) or {}
    per_kind = [value for value in parameters.values() if isinstance(value, dict)]
    for source in (parameters, *per_kind):
        value = source.get("original_max_position_embeddings")
        if isinstance(value, int):
            return value
    value = getattr(config, "original_max_position_embeddings", None)
    return value if isinstance(value, int) else None
