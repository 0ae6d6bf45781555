"""Messages of later versions: known parts are read, unknown ones are counted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.errors import ProtocolError, UnknownMessage
from kvscope_telemetry.ledger import BlockState, Tier
from kvscope_telemetry.messages import wire
from kvscope_telemetry.messages.commands import Finished, Status
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Event, Frame, Hello, Progress, Snapshot
from kvscope_telemetry.messages.unknown import Unknowns, known_telemetry
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.recordings.keyframes import snapshot_of

FUTURE = Path(__file__).with_name("golden_future.txt")
"""One message per line as a later version may send it, with its name: additional fields in every map, and unknown kinds
of events, states, tiers and messages. Written by hand; never regenerated."""


def future_messages(name: str) -> list[bytes]:
    lines = (line.split() for line in FUTURE.read_text("ascii").splitlines())
    found = [bytes.fromhex(data) for message, data in lines if message == name]
    assert found, name
    return found


def test_event_of_an_unknown_kind_is_skipped() -> None:
    unknowns = Unknowns()
    frame = wire.decode_telemetry(*future_messages("Frame"), unknowns)
    assert isinstance(frame, Frame)
    assert frame.events == (Event(kind="preempted", time_ns=1_999, number=7, other=6, cause="why", num_blocks=2),)
    assert (frame.seq, frame.counters.prompt_tokens, len(frame.blocks.state)) == (3, 5, 2)
    assert (unknowns.events, unknowns.messages, unknowns.values, unknowns.num_skipped) == (2, 0, 0, 2)


def test_unknown_states_and_tiers_become_unknown() -> None:
    unknowns = Unknowns()
    frame = wire.decode_telemetry(*future_messages("FrameStates"), unknowns)
    assert isinstance(frame, Frame)
    assert list(frame.blocks.state) == [BlockState.FREE, BlockState.UNKNOWN]
    assert list(frame.blocks.tier) == [Tier.UNKNOWN, Tier.HBM]
    assert list(frame.requests.state) == [RequestState.UNKNOWN]
    assert unknowns.values == 3


def test_snapshot_with_rows_of_a_new_tier_is_mirrored() -> None:
    """Its rows follow those of the known tiers; frames may change them and block tables may contain them."""
    snapshot = wire.decode_telemetry(*future_messages("Snapshot"))
    assert isinstance(snapshot, Snapshot)
    mirror = Mirror()
    mirror.reset(snapshot)
    assert (mirror.num_blocks, mirror.num_rows) == (3, 5)
    assert mirror.count(BlockState.UNKNOWN, Tier.UNKNOWN) == mirror.count(BlockState.ACTIVE, Tier.UNKNOWN) == 1
    states = {"state": b"\4\1", "tier": b"\t\t"}
    frame = wire.decode_telemetry(*future_messages("FrameStates"))
    assert isinstance(frame, Frame)
    ids = np.array([3, 4], "<u4").tobytes()
    changed = msgspec.structs.replace(frame.blocks, ids=ids, **states)
    later = msgspec.structs.replace(frame, seq=snapshot.seq + 1, blocks=changed, new_requests=())
    known = known_telemetry(later, Unknowns())
    assert isinstance(known, Frame)
    mirror.apply(coalesce([known]))
    assert mirror.ledger.state.tolist()[3:] == [BlockState.UNKNOWN, BlockState.ACTIVE]
    assert mirror.requests.state.tolist() == [RequestState.UNKNOWN]
    again = wire.decode_telemetry(wire.encode(snapshot_of(mirror)))
    assert isinstance(again, Snapshot)
    assert list(again.blocks.state)[3:] == [BlockState.UNKNOWN, BlockState.ACTIVE], (
        "an unknown state must not become a known one"
    )


@pytest.mark.parametrize("data", future_messages("Unknown"))
def test_message_of_an_unknown_kind_differs_from_a_broken_one(data: bytes) -> None:
    unknowns = Unknowns()
    with pytest.raises(UnknownMessage, match="unknown to this version"):
        wire.decode_telemetry(data, unknowns)
    assert unknowns.messages == 1
    with pytest.raises(ProtocolError) as broken:
        wire.decode_telemetry(data[:-1], unknowns)
    assert not isinstance(broken.value, UnknownMessage)
    assert unknowns.messages == 1


@pytest.mark.parametrize("name", ["Hello", "Progress", "Heartbeat", "DeviceSample", "MemoryBreakdown", "Goodbye"])
def test_unknown_values_and_fields_of_later_messages_are_accepted(name: str) -> None:
    unknowns = Unknowns()
    (data,) = future_messages(name)
    message = wire.decode_telemetry(data, unknowns)
    assert type(message).__name__ == name
    if isinstance(message, Hello):
        assert (message.device.kind, message.cache.allocator) == ("npu", "slab")
    if isinstance(message, Progress):
        assert message.stage == "compile"
    assert unknowns == Unknowns()


def test_unknown_values_and_fields_of_later_replies_are_accepted() -> None:
    unknowns = Unknowns()
    finished = wire.decode_reply(*future_messages("Finished"), unknowns)
    assert isinstance(finished, Finished)
    assert (finished.finish_reason, finished.usage.completion_tokens) == ("quota", 2)
    status = wire.decode_reply(*future_messages("Status"), unknowns)
    assert isinstance(status, Status)
    assert status.phase == "draining"
    assert unknowns.values == 2
    with pytest.raises(UnknownMessage):
        wire.decode_reply(*future_messages("UnknownReply"), unknowns)
    assert unknowns.messages == 1


def test_unknown_command_is_named_in_the_refusal() -> None:
    with pytest.raises(UnknownMessage, match="a command 'Migrate' is unknown to this version"):
        wire.decode_command(msgspec.msgpack.encode({"type": "Migrate", "to": "there"}))


def test_long_unknown_tag_is_truncated_in_the_error() -> None:
    with pytest.raises(UnknownMessage) as error:
        wire.decode_telemetry(msgspec.msgpack.encode({"type": "x" * 100_000}))
    assert len(str(error.value)) < 120


def _messages(engine: SimulatedEngine) -> Iterable[Frame | Snapshot]:
    yield engine.snapshot()
    for _ in range(20):
        yield engine.advance()


def test_telemetry_message_without_unknown_parts_is_not_copied() -> None:
    unknowns = Unknowns()
    for message in _messages(SimulatedEngine(num_blocks=100)):
        assert known_telemetry(message, unknowns) is message
    assert unknowns == Unknowns()
