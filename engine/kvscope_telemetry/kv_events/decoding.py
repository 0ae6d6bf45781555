"""Decodes a publisher's bytes to a batch of KV events, for every version of vLLM, SGLang and kvscope.

Unknown events and fields are skipped and counted; all others are decoded. Time and memory are bounded by the size of
the input. Raises no exception but ProtocolError.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw
from msgspec.structs import astuple

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.kv_events.batches import (
    HASH_MASK,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    block_key,
)
from kvscope_telemetry.kv_events.event_wire import (
    KNOWN_TYPES,
    MAX_BATCH_BYTES,
    BatchArray,
    BlockHash,
    ClearedArray,
    ClearedMap,
    ExtraKeys,
    HeadArray,
    HeadMap,
    Metadata,
    RemovedArray,
    RemovedMap,
    StoredArray,
    StoredMap,
    StoredPairsArray,
    StoredPairsMap,
)

_BATCH: Final = msgspec.msgpack.Decoder(BatchArray)
_MAPS: Final = msgspec.msgpack.Decoder(StoredMap | RemovedMap | ClearedMap)
_ARRAYS: Final = msgspec.msgpack.Decoder(StoredArray | RemovedArray | ClearedArray)
_PAIR_MAPS: Final = msgspec.msgpack.Decoder(StoredPairsMap)
_PAIR_ARRAYS: Final = msgspec.msgpack.Decoder(StoredPairsArray)
_HEAD_MAP: Final = msgspec.msgpack.Decoder(HeadMap)
_HEAD_ARRAY: Final = msgspec.msgpack.Decoder(HeadArray)
_EXTRA_KEYS: Final = msgspec.msgpack.Decoder(ExtraKeys)

_UNREADABLE: Final = (msgspec.DecodeError, ValueError, RecursionError, OverflowError)
_NIL: Final = b"\xc0"
_BATCH_FIELDS: Final = 3

_Stored = StoredMap | StoredArray | StoredPairsMap | StoredPairsArray
_Wire = _Stored | RemovedMap | RemovedArray | ClearedMap | ClearedArray


def decode_batch(payload: bytes) -> EventBatch:
    """Decode a batch. Raises ProtocolError if it is malformed."""
    if len(payload) > MAX_BATCH_BYTES:
        raise ProtocolError(f"a batch of KV events of {len(payload)} bytes is above {MAX_BATCH_BYTES}")
    try:
        batch = _BATCH.decode(payload)
    except _UNREADABLE as error:
        raise ProtocolError(f"not a batch of KV events: {error}") from None
    if not math.isfinite(batch.ts):
        raise ProtocolError(f"not a batch of KV events: its time is {batch.ts}")
    return _read(batch, max(0, _length(payload) - _BATCH_FIELDS))


def read_extra_keys(packed: bytes) -> ExtraKeys:
    """Decode `BlockStored.extra_keys`: for each block the inputs of its hash other than tokens, or None."""
    try:
        return _EXTRA_KEYS.decode(packed)
    except _UNREADABLE as error:
        raise ProtocolError(f"extra keys of a KV event cannot be read: {error}") from None


def _read(batch: BatchArray, num_unknown_fields: int) -> EventBatch:
    events: list[KvEvent] = []
    num_unknown_events = num_unreadable = 0
    unreadable = ""
    for raw in batch.events:
        view = memoryview(raw)
        try:
            wire = _decode(raw, view)
        except _UNREADABLE as error:
            if _is_unknown(raw, view):
                num_unknown_events += 1
            else:
                num_unreadable += 1
                unreadable = unreadable or str(error)
        else:
            event, num_known = _event(wire)
            events.append(event)
            num_unknown_fields += max(0, _length(view) - 1 - num_known)
    return EventBatch(
        batch.ts,
        tuple(events),
        batch.data_parallel_rank,
        num_unknown_events,
        num_unknown_fields,
        num_unreadable,
        unreadable,
    )


def _decode(raw: Raw, view: memoryview) -> _Wire:
    is_array = _is_array(view)
    try:
        wire: _Wire = _ARRAYS.decode(raw) if is_array else _MAPS.decode(raw)
    except msgspec.ValidationError:
        with contextlib.suppress(msgspec.ValidationError):
            pairs: _Wire = _PAIR_ARRAYS.decode(raw) if is_array else _PAIR_MAPS.decode(raw)
            return pairs
        raise
    return wire


def _is_unknown(raw: Raw, view: memoryview) -> bool:
    try:
        return (_HEAD_ARRAY if _is_array(view) else _HEAD_MAP).decode(raw).type not in KNOWN_TYPES
    except _UNREADABLE:
        return False


def _event(wire: _Wire) -> tuple[KvEvent, int]:
    """Convert a decoded struct to an event. Also returns the number of fields that were present."""
    if isinstance(wire, _Stored):
        return _stored(wire)
    if isinstance(wire, RemovedMap | RemovedArray):
        hashes, *optional = astuple(wire)
        return BlockRemoved(_keys(hashes), *_present(optional)), 1 + _num_present(optional)
    return AllBlocksCleared(), 0


def _stored(wire: _Stored) -> tuple[BlockStored, int]:
    hashes, parent, tokens, size, lora_id, medium, lora_name, extra_keys, *optional = astuple(wire)
    num_known = 4 + _num_present((lora_id, medium, lora_name, extra_keys)) + _num_present(optional)
    if isinstance(lora_name, Metadata):
        optional[-1], lora_name = lora_name.cache_salt, None
    if isinstance(wire, StoredPairsMap | StoredPairsArray):
        tokens = tuple([first for first, _ in tokens])
    values = (
        _keys(hashes),
        None if parent is None else block_key(parent),
        tokens,
        size,
        *_present((lora_id, medium, lora_name)),
        _packed_keys(extra_keys),
        *_present(optional),
    )
    return BlockStored(*values), num_known


def _keys(hashes: tuple[BlockHash, ...]) -> tuple[int, ...]:
    try:
        return tuple([value & HASH_MASK for value in hashes])  # type: ignore[operator]
    except TypeError:
        return tuple([block_key(value) for value in hashes])


def _present(values: Iterable[Any]) -> list[Any]:
    return [None if value is UNSET else value for value in values]


def _num_present(values: Iterable[Any]) -> int:
    return sum([value is not UNSET for value in values])


def _packed_keys(extra_keys: Any) -> bytes | None:
    """Return the bytes of the extra keys as a copy, because a view would keep the whole payload in memory; None for
    nil.
    """
    packed = None if extra_keys is UNSET else bytes(extra_keys)
    return None if packed == _NIL else packed


def _is_array(view: memoryview) -> bool:
    return 0x90 <= view[0] <= 0x9F or view[0] in (0xDC, 0xDD)


def _length(data: bytes | memoryview) -> int:
    """Return the number of elements of a MessagePack array, or of pairs of a map."""
    first = data[0]
    if 0x80 <= first <= 0x9F:
        return first & 0x0F
    return int.from_bytes(data[1:3] if first in (0xDC, 0xDE) else data[1:5], "big")
