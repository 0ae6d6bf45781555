"""Encodes a batch of KV events to the bytes that consumers of vLLM's and SGLang's events read.

The output equals vLLM 0.33's byte for byte (maps), or vLLM 0.23's (arrays, to imitate an older engine).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw

from kvscope_telemetry.kv_events.batches import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent
from kvscope_telemetry.kv_events.event_wire import ClearedMap, RemovedMap, StoredMap

_ENCODER: Final = msgspec.msgpack.Encoder()
_NUM_REQUIRED: Final = 7
"""Number of fields of a stored block that are sent even if they are None."""


def encode_batch(batch: EventBatch, *, arrays: bool = False) -> bytes:
    """Encode `batch` in the layout of vLLM 0.24 and later, or with `arrays` in that of 0.23, which has fewer fields."""
    events = [_array(event) if arrays else _map(event) for event in batch.events]
    return _ENCODER.encode((float(batch.ts), events, batch.data_parallel_rank))


def pack_extra_keys(keys: tuple[tuple[Any, ...] | None, ...]) -> bytes:
    return _ENCODER.encode(keys)


def _map(event: KvEvent) -> StoredMap | RemovedMap | ClearedMap:
    if isinstance(event, BlockStored):
        values = _stored_values(event)
        required, optional = values[:_NUM_REQUIRED], values[_NUM_REQUIRED:]
        return StoredMap(*required, *[UNSET if value is None else value for value in optional])
    if isinstance(event, BlockRemoved):
        hashes, medium, *optional = msgspec.structs.astuple(event)
        return RemovedMap(hashes, medium, *[UNSET if value is None else value for value in optional])
    return ClearedMap()


def _array(event: KvEvent) -> list[Any]:
    if isinstance(event, BlockStored):
        return ["BlockStored", *_stored_values(event)[:11]]
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", event.block_hashes, event.medium, event.group_idx]
    assert isinstance(event, AllBlocksCleared), f"{event} is no KV event"
    return ["AllBlocksCleared"]


def _stored_values(event: BlockStored) -> list[Any]:
    """Return the fields in wire order, which is their order in the class."""
    values = list(msgspec.structs.astuple(event))
    index = event.__struct_fields__.index("extra_keys")
    values[index] = None if event.extra_keys is None else Raw(event.extra_keys)
    return values
