"""Every layout that publishers use can be read; unknown parts are skipped and counted; only ProtocolError is raised."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.kv_events.batches import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, block_key
from kvscope_telemetry.kv_events.decoding import decode_batch, read_extra_keys
from kvscope_telemetry.kv_events.encoding import pack_extra_keys
from kvscope_telemetry.kv_events.event_wire import MAX_BATCH_BYTES, MAX_EVENTS

CAPTURED = dict(
    line.split() for line in (Path(__file__).parent / "captured.txt").read_text("ascii").splitlines() if line[0] != "#"
)
"""Bytes written by the publishers' own encoders, by name."""

DIGEST = bytes(range(32))
LOW = int.from_bytes(DIGEST[-8:], "big")
MINUS_ONE = (1 << 64) - 1
STORED = BlockStored((1, 2), None, (10, 11, 12, 13), 2, medium="GPU")
SALTED = msgspec.structs.replace(STORED, extra_keys=pack_extra_keys((None, ("salt",))))
FULL = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}

EXPECTED: dict[str, EventBatch] = {
    "vllm-0.33-stored": EventBatch(1.5, (msgspec.structs.replace(SALTED, **FULL),), 0),
    "vllm-0.33-removed": EventBatch(1.5, (BlockRemoved((2,), "GPU"), AllBlocksCleared()), 0),
    "vllm-0.23-stored": EventBatch(1.5, (msgspec.structs.replace(SALTED, **FULL),), 0),
    "vllm-0.23-removed": EventBatch(1.5, (BlockRemoved((2,), "GPU"), AllBlocksCleared()), 0),
    "sglang-0.5.23-stored": EventBatch(1.5, (STORED,), 0),
    "sglang-0.5.8-stored": EventBatch(1.5, (msgspec.structs.replace(STORED, medium=None),), 0),
    "sglang-0.5.8-removed": EventBatch(1.5, (BlockRemoved((2,)), AllBlocksCleared()), 0),
    "vllm-0.33-digests": EventBatch(
        1.5,
        (
            BlockStored((LOW,), int.from_bytes(DIGEST[::-1][-8:], "big"), (1, 2), 2, medium="GPU"),
            BlockRemoved((LOW,), "GPU"),
        ),
        0,
    ),
    "vllm-0.33-every-field": EventBatch(
        1.5,
        (
            BlockStored(
                (MINUS_ONE,),
                1 << 63,
                (1, 70000),
                2,
                lora_id=3,
                medium="STORAGE",
                lora_name="sql",
                extra_keys=pack_extra_keys((("sql", ("image", 4), "salt", DIGEST[:4]),)),
                group_idx=1,
                kv_cache_spec_kind="sliding_window",
                kv_cache_spec_sliding_window=128,
                locality="REMOTE",
                ownership="pool",
                session_id="s1",
                lookahead_token_ids=((5,),),
            ),
            BlockRemoved((MINUS_ONE,), "STORAGE", 1, "REMOTE", "pool"),
        ),
        3,
    ),
    "vllm-0.23-digests": EventBatch(
        1.5,
        (
            BlockStored(
                (LOW,),
                None,
                (1, 2),
                2,
                medium="CPU",
                lora_name="sql",
                extra_keys=pack_extra_keys((("sql", ("image", 4)),)),
                group_idx=1,
                kv_cache_spec_kind="sliding_window",
                kv_cache_spec_sliding_window=128,
            ),
            BlockRemoved((LOW,), "CPU", 1),
        ),
        1,
    ),
    "sglang-0.5.23-signed": EventBatch(
        1.5,
        (
            BlockStored(
                (MINUS_ONE, 1 << 63),
                MINUS_ONE - 4,
                (1, 2, 3, 4),
                2,
                medium="CPU_PINNED",
                lora_name="sql",
                session_id="s1",
                cache_salt="salt",
            ),
            BlockRemoved((MINUS_ONE,), "DISK"),
            AllBlocksCleared(),
        ),
        2,
    ),
    "sglang-0.5.23-pairs": EventBatch(1.5, (BlockStored((MINUS_ONE,), None, (1, 2), 2, medium="GPU"),), 0),
    "sglang-0.5.18-metadata": EventBatch(
        1.5,
        (
            BlockStored((MINUS_ONE,), None, (1, 2), 2, medium="GPU"),
            BlockStored((MINUS_ONE - 1,), MINUS_ONE, (1, 2), 2, medium="GPU", cache_salt="salt"),
            BlockRemoved((MINUS_ONE,), "GPU"),
        ),
        0,
    ),
    "sglang-0.5.8-signed": EventBatch(
        1.5, (BlockStored((MINUS_ONE,), None, (1, 2), 2), BlockRemoved((MINUS_ONE,)), AllBlocksCleared()), 0
    ),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_kv_event_batch_of_each_engine_version_is_decoded_exactly(name: str) -> None:
    assert decode_batch(bytes.fromhex(CAPTURED[name])) == EXPECTED[name]


def test_every_captured_batch_has_an_expected_value() -> None:
    assert CAPTURED.keys() == EXPECTED.keys()


def test_integer_and_bytes_hashes_give_the_same_key() -> None:
    assert block_key(DIGEST) == block_key(LOW) == block_key(LOW - (1 << 64)) == LOW
    assert block_key(-1) == block_key(MINUS_ONE) == block_key(b"\xff" * 8)


def test_extra_keys_are_decoded_on_request() -> None:
    (event,) = decode_batch(bytes.fromhex(CAPTURED["vllm-0.33-stored"])).events
    assert isinstance(event, BlockStored)
    assert event.extra_keys is not None
    assert read_extra_keys(event.extra_keys) == (None, ("salt",))
    with pytest.raises(ProtocolError, match="extra keys"):
        read_extra_keys(b"\xc1")


def batch_of(*events: object, rest: tuple[object, ...] = (0,)) -> bytes:
    return msgspec.msgpack.encode((1.5, events, *rest))


REMOVED: dict[str, object] = {"type": "BlockRemoved", "block_hashes": [7], "medium": None}


def test_kv_event_batch_without_a_rank_or_with_extra_fields_is_decoded() -> None:
    assert decode_batch(batch_of(REMOVED, rest=())).data_parallel_rank is None
    more = decode_batch(batch_of(REMOVED, rest=(1, "later", [2])))
    assert (more.data_parallel_rank, more.num_unknown_fields) == (1, 2)


def test_unknown_events_and_fields_are_counted_and_skipped() -> None:
    batch = decode_batch(
        batch_of(
            {"type": "BlockMoved", "block_hashes": [1]},
            REMOVED | {"later": {"a": [1]}, "more": None},
            ["BlockMoved", 1, 2],
            ["BlockRemoved", [8], "GPU", None, None, None, "later", 5],
            {"type": "AllBlocksCleared", "medium": "GPU"},
            ["AllBlocksCleared"],
        )
    )
    assert batch.events == (BlockRemoved((7,)), BlockRemoved((8,), "GPU"), AllBlocksCleared(), AllBlocksCleared())
    assert (batch.num_unknown_events, batch.num_unknown_fields, batch.num_unreadable_events) == (2, 5, 0)


@pytest.mark.parametrize(
    "spoilt",
    [
        {"type": "BlockRemoved"},
        {"type": "BlockRemoved", "block_hashes": "seven", "medium": None},
        {"type": "BlockRemoved", "block_hashes": [1.5], "medium": None},
        {"type": "BlockRemoved", "block_hashes": [7], "medium": "x" * 5000},
        {"type": 3},
        {},
        [],
        ["BlockStored", [1], None, [1 << 31], 16, None],
        ["BlockStored", [1], None, [-2], 16, None],
        ["BlockStored", [1], None, [1], -1, None],
        None,
        17,
        "BlockStored",
    ],
    ids=repr,
)
def test_unreadable_event_is_counted_and_the_others_are_read(spoilt: object) -> None:
    batch = decode_batch(batch_of(REMOVED, spoilt, REMOVED))
    assert batch.events == (BlockRemoved((7,)), BlockRemoved((7,)))
    assert batch.num_unreadable_events == 1
    assert batch.unreadable
    assert batch.num_unknown_events == 0


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"<html>",
        msgspec.msgpack.encode({"ts": 1.5}),
        msgspec.msgpack.encode((math.nan, [])),
        msgspec.msgpack.encode((math.inf, [])),
        msgspec.msgpack.encode(("now", [])),
        msgspec.msgpack.encode((1.5,)),
        msgspec.msgpack.encode((1.5, [], "rank")),
        msgspec.msgpack.encode((1.5, [], -1)),
        b"\x92\x01\xdd\xff\xff\xff\xff",
        b"\x92\x01" + struct.pack(">BI", 0xDD, MAX_EVENTS + 1) + b"\xc0" * (MAX_EVENTS + 1),
        b"\x92\x01\x91" + b"\x91" * 100_000,
        bytes(MAX_BATCH_BYTES + 1),
        batch_of(REMOVED)[:-3],
        batch_of(REMOVED) + b"\x00",
    ],
    ids=lambda payload: f"{payload[:8].hex()} of {len(payload)}",
)
def test_invalid_kv_event_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="batch of KV events"):
        decode_batch(payload)


@given(st.binary(max_size=400))
def test_random_bytes_are_decoded_or_refused(data: bytes) -> None:
    _check_refused_or_sound(data)


@given(st.sampled_from(sorted(CAPTURED.values())), st.data())
def test_mutated_captured_bytes_are_decoded_or_refused(captured: str, data: Any) -> None:
    payload = bytearray.fromhex(captured)
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    _check_refused_or_sound(bytes(payload))
    _check_refused_or_sound(bytes(payload[: data.draw(st.integers(0, len(payload)))]))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])
FIELDS = st.sampled_from(BlockStored.__struct_fields__)


@given(
    st.lists(
        st.tuples(NAMES, st.dictionaries(FIELDS, VALUES)).map(lambda item: {"type": item[0]} | item[1])
        | st.tuples(NAMES, st.lists(VALUES, max_size=14)).map(lambda item: [item[0], *item[1]])
        | VALUES,
        max_size=4,
    )
)
def test_random_events_are_decoded_skipped_or_counted(events: list[object]) -> None:
    batch = decode_batch(batch_of(*events))
    assert len(batch.events) + batch.num_unknown_events + batch.num_unreadable_events == len(events)
    _check_types(batch)


def _check_refused_or_sound(data: bytes) -> None:
    try:
        batch = decode_batch(data)
    except ProtocolError:
        return
    _check_types(batch)


def _check_types(batch: EventBatch) -> None:
    for event in batch.events:
        if isinstance(event, BlockStored | BlockRemoved):
            assert all(type(key) is int and 0 <= key < 1 << 64 for key in event.block_hashes)
        if isinstance(event, BlockStored):
            assert all(type(token) is int and 0 <= token < 1 << 31 for token in event.token_ids)
            assert event.parent_block_hash is None or 0 <= event.parent_block_hash < 1 << 64


def test_offloaded_block_without_size_and_tokens_is_read() -> None:
    """As vLLM's offload events (vllm 43468)."""
    stored = {"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": [], "block_size": 0}
    batch = decode_batch(batch_of(stored | {"lora_id": None, "medium": "CPU"}))
    assert (batch.events, batch.num_unreadable_events) == ((BlockStored((7,), None, (), 0, medium="CPU"),), 0)


def test_block_with_an_unknown_token_is_read() -> None:
    """As vllm-rbln 528."""
    batch = decode_batch(batch_of(["BlockStored", [1], None, [5, -1], 2, None]))
    assert (batch.events, batch.num_unreadable_events) == ((BlockStored((1,), None, (5, -1), 2),), 0)
