"""What a live source gives to a sink on real sockets: a consistent recording, whenever it starts and whatever the
channel does.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.simulated_engine.engine import SimulatedEngine
from tests.simulated_engine.server import SimulatedServer

from kvscope_telemetry import RecordingWriter
from kvscope_telemetry.messages.telemetry import (
    DeviceSample,
    Frame,
    Goodbye,
    Heartbeat,
    MemoryBreakdown,
    Progress,
    Snapshot,
    TelemetryMessage,
)
from kvscope_telemetry.messages.wire import decode_telemetry
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.state_continuity import Continuity
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.sources.live_source import LiveSource
from kvscope_telemetry.sources.sink import SinkFeed

WAIT_S = 60.0

MakeEndpoint = Callable[[str], str]
Serve = Callable[..., SimulatedServer]


class CollectingSink:
    """A sink that keeps everything that it accepts."""

    def __init__(self) -> None:
        self.failure = ""
        self.taken: list[TelemetryMessage] = []
        self.refuses = False
        self.threads: set[int] = set()

    def write(self, message: TelemetryMessage, data: bytes | None = None) -> bool:
        self.threads.add(threading.get_ident())
        if self.refuses:
            return False
        assert data is not None
        assert decode_telemetry(data) == message
        self.taken.append(message)
        return True

    def messages_of_type(self, *kinds: type[Any]) -> list[Any]:
        return [message for message in self.taken if isinstance(message, kinds)]

    def assert_sound(self) -> int:
        """Check that frames follow each other, after a snapshot at the start and after each gap. Returns their
        number.
        """
        sequence = Continuity()
        for message in self.messages_of_type(Frame, Snapshot):
            is_taken = sequence.accepts(message)
            assert is_taken or isinstance(message, Snapshot), f"frame {message.seq} does not follow {sequence.seq}"
        return len(self.messages_of_type(Frame))


def _wait_for(source: LiveSource, came: Callable[[], bool]) -> None:
    def look() -> bool:
        source.update_mirror()
        return came()

    assert source.wait(look, WAIT_S), source.status


def test_sink_from_the_start_gets_every_message(
    make_endpoint: MakeEndpoint, serve: Serve, proxy: Callable[..., str]
) -> None:
    server, sink = serve(endpoint := make_endpoint("ipc")), CollectingSink()
    sent: list[TelemetryMessage] = []

    def pass_on(data: bytes) -> list[bytes]:
        sent.append(decode_telemetry(data))
        return [data]

    with LiveSource(proxy(endpoint, pass_on), sink=sink) as source:
        _wait_for(
            source, lambda: len(sink.messages_of_type(Frame)) > 300 and len(sink.messages_of_type(DeviceSample)) > 1
        )
        server.close()
        _wait_for(source, lambda: len(sink.messages_of_type(Goodbye)) == 1)
    assert sink.assert_sound() > 300
    assert isinstance(sink.taken[0], Snapshot)
    assert isinstance(sink.taken[-1], Goodbye)
    assert len(sink.messages_of_type(Snapshot)) == 1
    assert sink.messages_of_type(Heartbeat)
    assert sink.messages_of_type(MemoryBreakdown)
    assert len(sink.threads) == 1
    timed = sink.messages_of_type(Frame, DeviceSample, MemoryBreakdown)
    assert timed == [m for m in sent if isinstance(m, Frame | DeviceSample | MemoryBreakdown)][-len(timed) :]


def test_recording_ends_in_the_state_of_the_mirror(
    make_endpoint: MakeEndpoint, serve: Serve, tmp_path: Path, assert_mirrors: Callable[..., None]
) -> None:
    server = serve(endpoint := make_endpoint("ipc"))
    with LiveSource(endpoint) as source:
        _wait_for(source, lambda: source.mirror.seq > 20)
        writer = RecordingWriter(tmp_path / "live.mcap")
        source.set_sink(writer)
        _wait_for(source, lambda: writer.num_written > 100)
        assert_mirrors(source, server, go_on=False)
        assert writer.flush()
        assert source.status.resyncs == 0
        writer.close()
        assert Recording.open(writer.path).state_at(1e9).ledger.equals(source.mirror.ledger)
        assert Recording.open(writer.path).state_at(1e9).seq == source.mirror.seq


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.storm) for seed in (1, 2))])
def test_sink_set_at_any_time_gets_a_consistent_stream(seed: int, make_endpoint: MakeEndpoint, serve: Serve) -> None:
    choose = random.Random(seed)
    serve(
        endpoint := make_endpoint("ipc"), rate=200.0
    )  # a rate whose backlog on a busy machine still fits into the sockets
    sinks = [CollectingSink() for _ in range(4)]
    with LiveSource(endpoint) as source:
        for sink in sinks:
            time.sleep(choose.uniform(0.0, 0.1))
            source.set_sink(sink)
            _wait_for(source, lambda sink=sink: len(sink.messages_of_type(Frame)) > 30)  # type: ignore[misc]
            source.set_sink(None)
        resyncs = source.status.resyncs
    assert resyncs == 0, "other sinks must not notice"
    for sink in sinks:
        assert sink.assert_sound() > 30
        assert isinstance(sink.taken[0], Snapshot)


@pytest.mark.parametrize("begin_late", [False, True])
def test_lossy_reordering_channel_leaves_a_consistent_recording(
    begin_late: bool, make_endpoint: MakeEndpoint, serve: Serve, proxy: Callable[..., str]
) -> None:
    choose = random.Random(5)
    late: list[bytes] = []

    def treat(data: bytes) -> list[bytes]:
        if b"\xa5Frame" not in data[:16]:
            return [data]
        luck = choose.random()
        if luck < 0.005:
            return []
        if luck < 0.01:
            late.append(data)
            return []
        return [data, data] if luck < 0.05 else [data, *(late.pop() for _ in late[:1])]

    serve(engine := make_endpoint("ipc"))
    sink = CollectingSink()
    with LiveSource(proxy(engine, treat)) as source:
        if begin_late:
            _wait_for(source, lambda: source.mirror.seq > 20)
        source.set_sink(sink)
        _wait_for(source, lambda: len(sink.messages_of_type(Frame)) > 200 and len(sink.messages_of_type(Snapshot)) > 1)
    assert sink.assert_sound() > 200


def test_recording_of_a_second_engine_run_starts_with_its_snapshot(make_endpoint: MakeEndpoint, serve: Serve) -> None:
    sink = CollectingSink()
    server = serve(endpoint := make_endpoint("ipc"), epoch=1)
    with LiveSource(endpoint, sink=sink) as source:
        _wait_for(source, lambda: len(sink.messages_of_type(Frame)) > 20)
        server.close()
        _wait_for(source, lambda: bool(sink.messages_of_type(Goodbye)))
        serve(endpoint, epoch=2)
        _wait_for(source, lambda: sum(frame.epoch == 2 for frame in sink.messages_of_type(Frame)) > 20)
    sink.assert_sound()
    assert [snapshot.hello.epoch for snapshot in sink.messages_of_type(Snapshot)] == [1, 2]
    epochs = [message.epoch for message in sink.taken if not isinstance(message, Snapshot | Progress)]
    assert epochs == sorted(epochs)


def test_updates_discarded_for_a_slow_consumer_are_followed_by_a_snapshot(
    make_endpoint: MakeEndpoint, serve: Serve
) -> None:
    sink = CollectingSink()
    serve(endpoint := make_endpoint("ipc"))
    with LiveSource(endpoint, sink=sink, max_entries=200) as source:
        assert source.wait(lambda: len(sink.messages_of_type(Frame)) > 100, WAIT_S)
        _wait_for(source, lambda: len(sink.messages_of_type(Snapshot)) > 1)
    sink.assert_sound()


def test_sink_that_refused_a_message_gets_a_snapshot(make_endpoint: MakeEndpoint, serve: Serve) -> None:
    sink = CollectingSink()
    serve(endpoint := make_endpoint("ipc"))
    with LiveSource(endpoint, sink=sink) as source:
        _wait_for(source, lambda: len(sink.messages_of_type(Frame)) > 10)
        sink.refuses = True
        seen = source.mirror.seq
        _wait_for(source, lambda: source.mirror.seq > seen + 10)
        sink.refuses = False
        _wait_for(
            source,
            lambda: (
                len(sink.messages_of_type(Snapshot)) > 1
                and sink.messages_of_type(Frame)[-1].seq > sink.messages_of_type(Snapshot)[-1].seq + 5
            ),
        )
        assert source.status.resyncs == 0
    sink.assert_sound()


def test_failed_sink_requests_no_snapshots(make_endpoint: MakeEndpoint, serve: Serve) -> None:
    sink = CollectingSink()
    server = serve(endpoint := make_endpoint("ipc"))
    with LiveSource(endpoint, sink=sink) as source:
        _wait_for(source, lambda: len(sink.messages_of_type(Frame)) > 10)
        sink.failure, sink.refuses = "the disk is full", True
        asked: list[int] = []
        snapshot = server.engine.snapshot
        server.engine.snapshot = lambda tag=0: asked.append(tag) or snapshot(tag)  # type: ignore[method-assign,func-returns-value]
        seen = source.mirror.seq
        _wait_for(source, lambda: source.mirror.seq > seen + 400)
        assert not asked


def test_snapshot_older_than_the_held_frames_is_not_used() -> None:
    engine = SimulatedEngine(num_blocks=50)
    feed, sink = SinkFeed(), CollectingSink()
    feed.add_accepted(engine.snapshot(), None)
    old = engine.snapshot()
    feed.add_accepted(engine.advance(), None)
    feed.set(sink)
    feed.begin_pass()
    kept: list[tuple[Any, bytes | None]] = []
    sink.write = lambda message, data=None: kept.append(message) or True  # type: ignore[method-assign,func-returns-value,assignment]
    second = engine.advance()
    feed.add_accepted(second, None)
    feed.snapshot(old, None)
    assert kept == []
    assert feed.wants_snapshot(0)
    fresh = engine.snapshot()
    third = engine.advance()
    feed.add_accepted(third, None)
    feed.snapshot(fresh, None)
    assert kept == [fresh, third]
    assert not feed.wants_snapshot(0)
    mirror = Mirror()
    mirror.reset(fresh)
    early = engine.snapshot()  # contains a frame that is still in flight
    assert early.seq == 3


class PlainSink:
    """A sink that keeps the messages without their bytes."""

    def __init__(self) -> None:
        self.failure = ""
        self.taken: list[TelemetryMessage] = []

    def write(self, message: TelemetryMessage, data: bytes | None = None) -> bool:
        self.taken.append(message)
        return True


@pytest.mark.parametrize("is_early", [False, True], ids=["snapshot behind", "snapshot ahead"])
def test_previous_sink_gets_the_frames_in_the_snapshot_of_the_next(is_early: bool) -> None:
    """A recording next to a ring passes messages on to the ring, which must not get a gap."""
    engine, feed, before, after = SimulatedEngine(num_blocks=50), SinkFeed(), PlainSink(), PlainSink()
    feed.set(before)
    feed.begin_pass()
    first = engine.snapshot()
    feed.add_accepted(first, None)
    frames = [engine.advance() for _ in range(5)]
    feed.add_accepted(frames[0], None)
    feed.set(after)
    feed.begin_pass()
    feed.add_accepted(frames[1], None)
    place = replace(engine.snapshot(), seq=frames[2].seq)
    if is_early:
        feed.snapshot(place, None)
        assert after.taken == []
        assert not feed.wants_snapshot(0), "it is there; frames are on their way"
    for frame in frames[2:4]:
        feed.add_accepted(frame, None)
    if not is_early:
        feed.snapshot(place, None)
    feed.add_accepted(frames[4], None)
    assert before.taken == [first, *frames[:3]]
    assert after.taken == [place, *frames[3:]]


def test_recording_sink_that_was_replaced_gets_no_more_messages() -> None:
    engine, feed, before, after = SimulatedEngine(num_blocks=50), SinkFeed(), PlainSink(), PlainSink()
    feed.set(before)
    feed.begin_pass()
    feed.add_accepted(engine.snapshot(), None)
    feed.set(None)
    feed.begin_pass()
    feed.set(after)
    feed.begin_pass()
    feed.add_accepted(engine.advance(), None)
    feed.snapshot(engine.snapshot(), None)
    assert [len(sink.taken) for sink in (before, after)] == [1, 1]
