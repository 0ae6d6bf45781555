"""Encoded KV events equal vLLM's byte for byte, and round trip."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope_telemetry.kv_events.batches import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvscope_telemetry.kv_events.decoding import decode_batch
from kvscope_telemetry.kv_events.encoding import encode_batch, pack_extra_keys

CAPTURED = dict(
    line.split() for line in (Path(__file__).parent / "captured.txt").read_text("ascii").splitlines() if line[0] != "#"
)


@pytest.mark.parametrize("name", ["vllm-0.33-stored", "vllm-0.33-removed", "vllm-0.33-every-field"])
def test_map_encoding_equals_vllm_byte_for_byte(name: str) -> None:
    assert encode_batch(decode_batch(bytes.fromhex(CAPTURED[name]))).hex() == CAPTURED[name]


@pytest.mark.parametrize("name", ["vllm-0.23-stored", "vllm-0.23-removed"])
def test_array_encoding_equals_older_vllm_byte_for_byte(name: str) -> None:
    assert encode_batch(decode_batch(bytes.fromhex(CAPTURED[name])), arrays=True).hex() == CAPTURED[name]


HASHES = st.lists(st.integers(0, (1 << 64) - 1), max_size=5).map(tuple)
TOKENS = st.lists(st.integers(0, (1 << 31) - 1), max_size=20).map(tuple)
NAME = st.none() | st.text(max_size=20)
COUNT = st.none() | st.integers(0, (1 << 31) - 1)
EXTRA = st.none() | st.lists(st.none() | st.tuples(st.text(), st.integers(0, 9)), max_size=3).map(
    lambda keys: pack_extra_keys(tuple(keys))
)
STORED = st.builds(
    BlockStored,
    HASHES,
    st.none() | st.integers(0, (1 << 64) - 1),
    TOKENS,
    st.integers(1, 1024),
    lora_id=COUNT,
    medium=NAME,
    lora_name=NAME,
    extra_keys=EXTRA,
    group_idx=COUNT,
    kv_cache_spec_kind=NAME,
    kv_cache_spec_sliding_window=COUNT,
    locality=NAME,
    ownership=NAME,
    session_id=NAME,
    lookahead_token_ids=st.none() | st.lists(TOKENS, max_size=3).map(tuple),
    cache_salt=NAME,
)
REMOVED = st.builds(BlockRemoved, HASHES, NAME, COUNT, NAME, NAME)
BATCHES = st.builds(
    EventBatch,
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(STORED | REMOVED | st.just(AllBlocksCleared()), max_size=5).map(tuple),
    COUNT,
)


@given(BATCHES)
def test_kv_event_batch_decoded_from_its_encoding_is_equal(batch: EventBatch) -> None:
    assert decode_batch(encode_batch(batch)) == batch


@given(BATCHES)
def test_array_encoding_loses_only_the_fields_without_a_position(batch: EventBatch) -> None:
    events = tuple(_as_in_an_array(event) for event in batch.events)
    assert decode_batch(encode_batch(batch, arrays=True)) == msgspec.structs.replace(batch, events=events)


def _as_in_an_array(
    event: BlockStored | BlockRemoved | AllBlocksCleared,
) -> BlockStored | BlockRemoved | AllBlocksCleared:
    if isinstance(event, AllBlocksCleared):
        return event
    without = {"locality": None, "ownership": None}
    if isinstance(event, BlockStored):
        without |= {"session_id": None, "lookahead_token_ids": None, "cache_salt": None}
    return msgspec.structs.replace(event, **without)
