"""Parents of blocks: on the wire, in recordings, and where they are not reported."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import BlockRows, Ledger, unpack
from kvscope_telemetry.messages import wire
from kvscope_telemetry.messages.telemetry import Frame, Hello, Snapshot
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.prefixes.cached_blocks import blocks_of
from kvscope_telemetry.prefixes.tree import PrefixTree, build
from kvscope_telemetry.recordings.reader import Recording

GOLDEN_FRAME = (
    "86a474797065a54672616d65a565706f636801a373657103a47374657004a774696d655f6e7305a6626c6f636b738aa3696473c404010000"
    "00a57374617465c40102a97265665f636f756e74c40400000000a666696c6c6564c4020400a56f776e6572c40407000000a474696572c401"
    "00ae6c6173745f757365645f73746570c40404000000ab7072656669785f68697473c4020000a468617368c4080900000000000000a6706172656e74c40808"
    "00000000000000"
)


def ledger_of_two() -> Ledger:
    ledger = Ledger(3)
    ledger.state[1], ledger.filled[1], ledger.owner[1], ledger.last_used_step[1] = 2, 4, 7, 4
    ledger.hash[1], ledger.parent[1] = 9, 8
    return ledger


def frame_of(blocks: BlockRows) -> Frame:
    return Frame(epoch=1, seq=3, step=4, time_ns=5, blocks=blocks)


def test_frame_with_block_parents_encodes_to_the_stored_bytes() -> None:
    frame = frame_of(ledger_of_two().pack(np.array([1], np.uint32)))
    assert wire.encode(frame).hex() == "de0006" + GOLDEN_FRAME[2:]  # the map of a frame is written with a 16-bit length
    assert wire.decode_telemetry(bytes.fromhex(GOLDEN_FRAME)) == frame


def test_only_known_parents_of_hashed_rows_take_bytes() -> None:
    ledger = ledger_of_two()
    assert len(ledger.pack(np.array([0, 1, 2], np.uint32)).parent) == 8
    assert len(ledger.pack_all().parent) == 8
    assert ledger.pack(np.array([0, 2], np.uint32)).parent == b""
    ledger.parent[1] = 0
    assert ledger.pack_all().parent == b""


def test_frames_with_and_without_parents_are_merged() -> None:
    ledger = ledger_of_two()
    with_parent = ledger.pack(np.array([0, 1], np.uint32))
    ledger.parent[1] = 0
    without = ledger.pack(np.array([1, 2], np.uint32))
    assert unpack([with_parent, without, with_parent])["parent"].tolist() == [0, 8, 0, 0, 0, 8]
    assert coalesce([frame_of(without), frame_of(with_parent)]).block_columns["parent"].tolist() == [0, 0, 0, 8]


@pytest.mark.parametrize("parent", [b"\1", b"\1" * 7, b"\1" * 16, b"\1" * 800])
def test_parent_column_of_wrong_length_is_refused(parent: bytes) -> None:
    rows = msgspec.structs.replace(ledger_of_two().pack_all(), parent=parent)
    frame = msgspec.structs.replace(rows, ids=np.arange(3, dtype="<u4").tobytes())
    with pytest.raises(ProtocolError, match="bytes of parents where rows with a hash have 8"):
        wire.decode_telemetry(wire.encode(frame_of(frame)))


def tree_of(recording: Recording, at_s: float) -> PrefixTree:
    return build(blocks_of(recording.state_at(at_s).ledger))


def assert_same_tree(found: PrefixTree, expected: PrefixTree) -> None:
    for name in PrefixTree.__slots__:
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


def test_prefix_tree_at_random_times_equals_the_mirror(record: Callable[..., Any]) -> None:
    """Seeks use keyframes, delta checkpoints and frames."""
    recorded = record(700, keyframe_interval_ns=6_000_000_000)
    recording = Recording.open(recorded.path)
    times = {message.seq: at for at, message in recording.messages() if isinstance(message, Frame)}
    for seq in random.sample(range(1, 701), 25):
        expected = build(blocks_of(recorded.mirror_after(seq + 2).ledger))
        assert len(expected) > 10
        assert_same_tree(tree_of(recording, times[seq]), expected)


def test_older_recording_opens_without_parents(record: Callable[..., Any], make_messages: Callable[..., Any]) -> None:
    recorded = record([as_older_version(message) for message in make_messages(200)])
    mirror = Recording.open(recorded.path).state_at(1e9)
    assert mirror.hello is not None
    assert not mirror.hello.cache.has_parents
    assert mirror.ledger.hash.any()
    assert not mirror.ledger.parent.any()


def as_older_version(message: Any) -> Any:
    if isinstance(message, Hello):
        return msgspec.structs.replace(message, cache=msgspec.structs.replace(message.cache, has_parents=False))
    if isinstance(message, Snapshot):
        message = msgspec.structs.replace(message, hello=as_older_version(message.hello))
    return msgspec.structs.replace(message, blocks=msgspec.structs.replace(message.blocks, parent=b""))
