"""Encodes a batch of KV events into the bytes that consumers of vLLM's and SGLang's events read.

Byte for byte what vLLM 0.33 sends (maps), or vLLM 0.23 (arrays, for who stands in for an old engine).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw

from kvscope_telemetry.kv_events.batches import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent
from kvscope_telemetry.kv_events.wire import ClearedMap, RemovedMap, StoredMap

_ENCODER: Final = msgspec.msgpack.Encoder()
_NUM_ALWAYS: Final = 7
"""Fields of a stored block that are sent also where they are None."""


def encode_batch(batch: EventBatch, *, arrays: bool = False) -> bytes:
    """`batch` in the layout of vLLM 0.24 and later; with `arrays` that of 0.23, which has fewer fields."""
    events = [_array(event) if arrays else _map(event) for event in batch.events]
    return _ENCODER.encode((float(batch.ts), events, batch.data_parallel_rank))


def pack_extra_keys(keys: tuple[tuple[Any, ...] | None, ...]) -> bytes:
    """For `BlockStored.extra_keys`: an entry a block."""
    return _ENCODER.encode(keys)


def _map(event: KvEvent) -> StoredMap | RemovedMap | ClearedMap:
    if isinstance(event, BlockStored):
        values = _stored_values(event)
        always, rest = values[:_NUM_ALWAYS], values[_NUM_ALWAYS:]
        return StoredMap(*always, *[UNSET if value is None else value for value in rest])
    if isinstance(event, BlockRemoved):
        hashes, medium, *rest = msgspec.structs.astuple(event)
        return RemovedMap(hashes, medium, *[UNSET if value is None else value for value in rest])
    return ClearedMap()


def _array(event: KvEvent) -> list[Any]:
    if isinstance(event, BlockStored):
        return ["BlockStored", *_stored_values(event)[:11]]
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", event.block_hashes, event.medium, event.group_idx]
    assert isinstance(event, AllBlocksCleared), f"{event} is no KV event"
    return ["AllBlocksCleared"]


def _stored_values(event: BlockStored) -> list[Any]:
    """In the order of the wire, which is that of the fields."""
    values = list(msgspec.structs.astuple(event))
    place = event.__struct_fields__.index("extra_keys")
    values[place] = None if event.extra_keys is None else Raw(event.extra_keys)
    return values
