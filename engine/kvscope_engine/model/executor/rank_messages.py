"""Defines the messages between rank 0 and the other ranks, and their conversion to and from arrays.

A step is sent as the model's input arrays: block ids are the same on all ranks, so there is one scheduler and one
ledger, and only the bytes behind an id differ. Messages are msgpack; nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.input_batch.step_inputs import StepInputs
from kvscope_engine.model.kv_cache.kv_offload.block_mover import MoveKind
from kvscope_engine.model.layers.lora.peft_folder import Delta


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class LoadShare(_Message, frozen=True, kw_only=True):
    """Order to load the rank's share of the model. Rank 0 has loaded already, so every file is on disk."""

    config: bytes
    """An `EngineConfig` as JSON."""
    lora_layers: tuple[str, ...] = ()
    """Names of the layers that the LoRA adapters of `config` change."""


class RankSettings(_Message, frozen=True, kw_only=True):
    """Order to allocate blocks and connect, with the settings that all ranks support (the minimum over ranks)."""

    num_blocks: int
    float32_residual: bool
    captures: bool = False
    """Whether all ranks capture CUDA graphs once they have connected."""


class Step(_Message, frozen=True, kw_only=True):
    """Order to run a step: `StepInputs` as bytes, without the fields that only sampling reads."""

    input_ids: bytes
    positions: bytes
    slot_mapping: bytes
    block_tables: bytes
    seq_lens: bytes
    query_start: bytes
    num_single_token: int
    num_groups: int = 1
    copies: bytes = b""
    """(source, target) blocks to copy before the step, int64."""
    awaited: bytes = b""
    """`StepInputs.awaited` as bytes: the batch rows whose tokens the previous step samples. These tokens are broadcast
    before the step.
    """
    num_sampled: int = 0
    """Number of tokens that the previous step sampled, if `awaited` is not empty."""
    graph_size: int = 0
    """Size of the CUDA graph that all ranks replay; 0 if none."""
    lora_slots: bytes = b""
    """Adapter slot of each batch row, -1 for no adapter; empty if no row has an adapter."""


class DeltaBytes(msgspec.Struct, frozen=True, array_like=True):
    """A rank's share of an adapter's update of a linear layer, in the model's dtype."""

    rank: int
    a: bytes
    """Matrix A, (rank, inputs)."""
    b: bytes
    """Matrix B, (outputs, rank)."""


class FillLoraSlot(_Message, frozen=True, kw_only=True):
    """Order to replace the contents of an adapter slot in one stack of LoRA weights: a delta, or None, for each linear
    layer of the stack.
    """

    stack: str
    slot: int
    deltas: tuple[DeltaBytes | None, ...]


class MoveBlocks(_Message, frozen=True, kw_only=True):
    """Order to move blocks from one tier to another, as passed to rank 0's `BlockMover`."""

    how: MoveKind
    """Name of the method of `BlockMover`."""
    sources: bytes = b""
    targets: bytes = b""


class Shutdown(_Message, frozen=True, kw_only=True):
    """Order to end the process."""


class RankHello(_Message, frozen=True, kw_only=True):
    """First message that a rank sends after it has connected."""

    rank: int
    pid: int


class Ready(_Message, frozen=True, kw_only=True):
    """Report that the rank has loaded, fused and profiled its share, with the settings that it supports."""

    num_blocks: int
    float32_residual: bool


class RankJoined(_Message, frozen=True, kw_only=True):
    """Report that the rank has allocated its blocks and joined the process group, with its memory."""

    weights_bytes: int
    kv_bytes: int
    device: str


class RankHeartbeat(_Message, frozen=True, kw_only=True):
    """Heartbeat of a rank, sent by a separate thread even while the rank computes."""

    num_points: int
    """Number of synchronization points that the rank has reached; see `RankGroup`."""


class BlocksMoved(_Message, frozen=True, kw_only=True):
    """Result of an `offload`, `load_from_disk` or `drain` of `BlockMover` on one rank."""

    succeeded: bytes
    """One byte per block, or a single byte for `drain`: 1 if it succeeded."""


class RankFailed(_Message, frozen=True, kw_only=True):
    """Last message of a rank that failed."""

    reason: str
    is_consequence: bool = False
    """Whether another rank caused the failure."""


ToRank: TypeAlias = LoadShare | RankSettings | Step | FillLoraSlot | MoveBlocks | Shutdown
FromRank: TypeAlias = RankHello | Ready | RankJoined | RankHeartbeat | BlocksMoved | RankFailed

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode


def step_of(
    inputs: StepInputs,
    copies: Sequence[tuple[int, int]],
    lora_slots: NDArray[np.int64] | None = None,
    num_sampled: int = 0,
    graph_size: int = 0,
) -> Step:
    return Step(
        input_ids=inputs.input_ids.tobytes(),
        positions=inputs.positions.tobytes(),
        slot_mapping=np.ascontiguousarray(inputs.slot_mapping).tobytes(),
        block_tables=np.ascontiguousarray(inputs.block_tables).tobytes(),
        seq_lens=inputs.seq_lens.tobytes(),
        query_start=inputs.query_start.tobytes(),
        num_single_token=inputs.num_single_token,
        num_groups=len(inputs.slot_mapping),
        copies=np.array(copies, np.int64).tobytes() if copies else b"",
        awaited=inputs.awaited.tobytes() if inputs.awaited is not None else b"",
        num_sampled=num_sampled,
        graph_size=graph_size,
        lora_slots=lora_slots.tobytes() if lora_slots is not None else b"",
    )


def inputs_of(step: Step) -> tuple[StepInputs, list[tuple[int, int]], NDArray[np.int64] | None]:
    """Convert a message to the step's input arrays (writable, without sampled rows), block copies (source, target), and
    adapter slots.
    """
    seq_lens = _array(step.seq_lens, np.int32)
    inputs = StepInputs(
        input_ids=_array(step.input_ids, np.int64),
        positions=_array(step.positions, np.int64),
        slot_mapping=_array(step.slot_mapping, np.int64).reshape(step.num_groups, -1),
        block_tables=_array(step.block_tables, np.int32).reshape(step.num_groups, len(seq_lens), -1),
        seq_lens=seq_lens,
        query_start=_array(step.query_start, np.int32),
        num_single_token=step.num_single_token,
        sample_rows=np.empty(0, np.int64),
        awaited=_array(step.awaited, np.int64).reshape(2, -1) if step.awaited else None,
    )
    copies = [(int(source), int(target)) for source, target in _array(step.copies, np.int64).reshape(-1, 2)]
    return inputs, copies, _array(step.lora_slots, np.int64) if step.lora_slots else None


def move_of(how: MoveKind, sources: Sequence[int] = (), targets: Sequence[int] = ()) -> MoveBlocks:
    return MoveBlocks(
        how=how, sources=np.array(sources, np.int64).tobytes(), targets=np.array(targets, np.int64).tobytes()
    )


def block_ids_of(move: MoveBlocks) -> tuple[list[int], list[int]]:
    return _array(move.sources, np.int64).tolist(), _array(move.targets, np.int64).tolist()


def fill_of(stack: str, slot: int, deltas: Sequence[Delta | None]) -> FillLoraSlot:
    encoded = tuple(
        None if delta is None else DeltaBytes(len(delta.a), _bytes(delta.a), _bytes(delta.b)) for delta in deltas
    )
    return FillLoraSlot(stack=stack, slot=slot, deltas=encoded)


def deltas_of(fill: FillLoraSlot, dtype: torch.dtype) -> list[Delta | None]:
    return [
        None
        if encoded is None
        else Delta(_matrix(encoded.a, dtype, encoded.rank), _matrix(encoded.b, dtype, -1, encoded.rank))
        for encoded in fill.deltas
    ]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _matrix(data: bytes, dtype: torch.dtype, rows: int, columns: int = -1) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(rows, columns)


def _array(data: bytes, dtype: Any) -> NDArray[Any]:
    return np.frombuffer(data, dtype).copy()
