"""An old desktop beside a newer engine, on real sockets: it follows what it knows, and does not ask for ever."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from msgspec import msgpack
from tests.simulated_engine.engine import SimulatedEngine
from tests.simulated_engine.server import SimulatedServer

from kvscope_telemetry.messages.commands import GetSnapshot
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.messages.wire import decode_command, tag_of
from kvscope_telemetry.mirror.sync import MAX_INTERVAL_NS, REQUEST_INTERVAL_NS, Sync
from kvscope_telemetry.source import SourceState
from kvscope_telemetry.sources.live_source import LiveSource

WAIT_S = 60.0

MakeEndpoint = Callable[[str], str]
Serve = Callable[..., SimulatedServer]
Watch = Callable[..., LiveSource]
MakeProxy = Callable[..., str]


def _newer(value: Any) -> Any:
    """With a field more in every map."""
    if isinstance(value, dict):
        return {**{key: _newer(each) for key, each in value.items()}, "since_version_2": [1, {"a": None}]}
    return [_newer(each) for each in value] if isinstance(value, list) else value


def newer_telemetry(data: bytes) -> list[bytes]:
    """What an engine to come would have sent: another message before each, events of another kind in each frame."""
    message = msgpack.decode(data)
    if message["type"] == "Frame":
        migrated = {"kind": "migrated", "time_ns": message["time_ns"], "cause": "to another rank"}
        message["events"] = [migrated, *message.get("events", [])]
    another = {"type": "ExpertLoad", "epoch": message.get("epoch", 0), "share": 0.5}
    return [msgpack.encode(another), msgpack.encode(_newer(message))]


def newer_reply(data: bytes) -> bytes:
    return msgpack.encode(_newer(msgpack.decode(data)))


def test_it_follows_a_newer_engine_and_counts_what_it_leaves_out(
    make_endpoint: MakeEndpoint, serve: Serve, watch: Watch, proxy: MakeProxy, assert_mirrors: Callable[..., None]
) -> None:
    server = serve(endpoint := make_endpoint("ipc"))
    source = watch(proxy(endpoint, newer_telemetry, newer_reply))

    def has_seen() -> bool:
        source.update_mirror()
        return source.status.frames_received >= 200

    assert source.wait(has_seen, WAIT_S), source.status
    assert_mirrors(source, server)
    assert source.wait(lambda: source.status.state is SourceState.LIVE, WAIT_S), source.status
    status = source.status
    assert (status.resyncs, status.messages_rejected, status.frames_dropped) == (0, 0, 0)
    assert status.num_skipped >= 2 * 200, "a message and an event a frame"


def test_an_engine_of_another_protocol_is_said_to_be_one(
    make_endpoint: MakeEndpoint, serve: Serve, watch: Watch, proxy: MakeProxy
) -> None:
    def of_protocol_2(data: bytes) -> bytes:
        message = msgpack.decode(data)
        for hello in (message, message.get("hello")):
            if hello is not None and "wall_time_ns" in hello:
                hello["protocol_version"] = 2
        return bytes(msgpack.encode(message))

    serve(endpoint := make_endpoint("ipc"))
    source = watch(proxy(endpoint, lambda data: [of_protocol_2(data)], of_protocol_2))
    assert source.wait(lambda: "protocol 2" in source.status.reason, WAIT_S), source.status
    assert source.status.reason == "the engine speaks protocol 2, this version up to 1"
    assert source.status.state is SourceState.CONNECTING
    assert source.poll_update() is None or source.mirror.epoch is None


def test_what_cannot_be_read_is_asked_for_ever_more_seldom() -> None:
    """Frames that are unreadable make holes; a snapshot closes each for a moment only."""
    engine, sync, now_ns, asked = SimulatedEngine(num_blocks=50), Sync(), 0, []
    for _ in range(3000):  # five minutes, a frame each 100 ms of which the first after a snapshot is lost
        now_ns += 100_000_000
        frame = engine.advance()
        if sync.in_sync:
            sync.unreadable()
            sync.frame(engine.advance(), now_ns)
        else:
            sync.frame(frame, now_ns)
        tag = sync.next_request(now_ns)
        if tag is not None:
            sync.sent(tag, now_ns)
            asked.append(now_ns)
            for _ in range(3):
                sync.unreadable()
            assert sync.snapshot(engine.snapshot(tag), now_ns)
    gaps = [after - before for before, after in pairwise(asked)]
    assert gaps[0] <= 8 * REQUEST_INTERVAL_NS
    assert gaps == sorted(gaps)
    assert MAX_INTERVAL_NS // 2 <= gaps[-1] <= MAX_INTERVAL_NS + REQUEST_INTERVAL_NS
    sync.disconnected()
    sync.lose()
    assert sync.next_request(now_ns + REQUEST_INTERVAL_NS) is not None, "another connection may be another engine"


def test_tags_are_told_without_the_rest() -> None:
    engine = SimulatedEngine(num_blocks=50)
    data = newer_telemetry(msgpack.encode({"type": "Frame", "time_ns": 1, "epoch": engine.hello.epoch}))
    assert [tag_of(each) for each in data] == ["ExpertLoad", Frame.__name__]
    assert tag_of(b"") == tag_of(b"\x01") == tag_of(b"\x91" * 100_000) == ""
    assert decode_command(msgpack.encode({"type": "GetSnapshot", "tag": 3, "since": 1})) == GetSnapshot(tag=3)
