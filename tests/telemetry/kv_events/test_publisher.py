"""Our publisher, read with plain sockets and msgpack like vLLM's consumers do, and by our own stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tests.telemetry.kv_events.conftest import WAIT_S, WatchedStream, wait_for

from kvscope_telemetry.errors import BadInput, EndpointInUse
from kvscope_telemetry.kv_events.batches import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvscope_telemetry.kv_events.event_publisher import KvEventPublisher
from kvscope_telemetry.kv_events.kv_events_config import KvEventsConfig
from kvscope_telemetry.kv_events.stream_items import Gap, StreamState

Socket = zmq.Socket[bytes]
END = b"\xff" * 8


@pytest.fixture
def publish() -> Iterator[Callable[..., KvEventPublisher]]:
    """Function that makes a publisher on free loopback ports: `publish(**fields of the configuration)`."""
    made: list[KvEventPublisher] = []

    def make(**fields: Any) -> KvEventPublisher:
        local: dict[str, Any] = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", "bind": True}
        made.append(KvEventPublisher(KvEventsConfig(enable_kv_cache_events=True, **(local | fields))))
        return made[-1]

    yield make
    for each in made:
        each.close()


def stored(seq: int) -> BlockStored:
    return BlockStored((seq + 1,), seq or None, (seq, seq), 2, medium="GPU")


def subscriber(context: zmq.Context[Socket], publisher: KvEventPublisher, topic: bytes = b"") -> Socket:
    """Return a socket whose subscription has arrived: empty batches are published until one comes."""
    socket = context.socket(zmq.SUB)
    socket.subscribe(topic)
    socket.connect(publisher.endpoint)

    def has_come() -> bool:
        publisher.publish([AllBlocksCleared()])
        return bool(socket.poll(20))

    wait_for(has_come)
    return socket


def replay(context: zmq.Context[Socket], publisher: KvEventPublisher, start: int) -> list[list[bytes]]:
    """Return what a DEALER receives for a replay request, including the end marker."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        answers: list[list[bytes]] = []
        while not answers or answers[-1][2] != END:
            assert dealer.poll(int(1000 * WAIT_S)), f"no end after {len(answers)} answers"
            answers.append(dealer.recv_multipart())
        return answers


def published_all(context: zmq.Context[Socket], publisher: KvEventPublisher) -> bool:
    return len(replay(context, publisher, publisher.next_seq - 1)) == 2


def test_published_kv_event_batches_have_three_parts_and_consecutive_numbers(
    context: zmq.Context[Socket], publish: Callable[..., KvEventPublisher]
) -> None:
    publisher = publish(topic="kv-events")
    socket = subscriber(context, publisher, b"kv-")
    first = publisher.next_seq
    for seq in range(first, first + 20):
        publisher.publish([stored(seq), BlockRemoved((seq,), "GPU")], ts=seq + 0.5)
    seen: list[tuple[int, Any]] = []
    while not seen or seen[-1][0] < first + 19:
        assert socket.poll(int(1000 * WAIT_S))
        topic, seq_bytes, payload = socket.recv_multipart()
        assert topic == b"kv-events"
        seen.append((int.from_bytes(seq_bytes, "big"), msgspec.msgpack.decode(payload)))
    socket.close(linger=0)
    numbers = [seq for seq, _ in seen]
    assert numbers == list(range(numbers[0], first + 20))
    ts, (store, removal), rank = seen[-1][1]
    assert (ts, rank) == (first + 19.5, 0)
    assert store["type"] == "BlockStored"
    assert (store["block_hashes"], store["parent_block_hash"], store["medium"]) == ([first + 20], first + 19, "GPU")
    assert {"lora_id", "lora_name", "token_ids", "block_size"} <= store.keys()
    assert removal == {"type": "BlockRemoved", "block_hashes": [first + 19], "medium": "GPU"}


def test_kv_event_replay_starts_at_the_requested_batch_number(
    context: zmq.Context[Socket], publish: Callable[..., KvEventPublisher]
) -> None:
    publisher = publish(topic="t", buffer_steps=8)
    for seq in range(20):
        publisher.publish([stored(seq)])
    wait_for(lambda: published_all(context, publisher))
    *answers, end = replay(context, publisher, 15)
    assert end == [b"", b"", END, b""]
    assert [(empty, topic, int.from_bytes(seq, "big")) for empty, topic, seq, _ in answers] == [
        (b"", b"t", seq) for seq in range(15, 20)
    ]
    assert len(replay(context, publisher, 0)) == 9
    assert replay(context, publisher, 20) == [end]
    assert replay(context, publisher, (1 << 64) - 1) == [end]


@pytest.mark.parametrize(
    "request_", [[b""], [b"", b""], [b"", bytes(7)], [b"", bytes(8), b""], [b"x"], [b"", bytes(1024)]]
)
def test_malformed_replay_request_is_ignored(
    context: zmq.Context[Socket], publish: Callable[..., KvEventPublisher], request_: list[bytes]
) -> None:
    publisher = publish()
    publisher.publish([stored(0)])
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart(request_)
        dealer.send_multipart([b"", bytes(8)])
        assert dealer.poll(int(1000 * WAIT_S))
        assert len(dealer.recv_multipart()) == 4


def test_early_and_late_kv_event_streams_reach_the_same_cache_content(
    context: zmq.Context[Socket], publish: Callable[..., KvEventPublisher], watch: Callable[..., WatchedStream]
) -> None:
    publisher = publish(topic="kv")
    for seq in range(300):
        publisher.publish([stored(seq)])
    early = watch(publisher.endpoint, publisher.replay_endpoint)
    early.until(lambda: early.stream.status.state is StreamState.LIVE)
    for seq in range(300, 600):
        publisher.publish([stored(seq), BlockRemoved((seq - 200,), "GPU")])
    late = watch(publisher.endpoint, publisher.replay_endpoint)
    for each in (early, late):
        each.until(lambda each=each: each.stream.status.seq == 599)
        each.until(lambda each=each: each.stream.status.state is StreamState.LIVE)
        each.until(lambda each=each: each.follower.cached == {*range(1, 100), *range(400, 601)})
    assert early.follower.cached == late.follower.cached


def test_full_queue_drops_batches_without_blocking(
    context: zmq.Context[Socket], publish: Callable[..., KvEventPublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, is_held = threading.Event(), threading.Event()

    def held(batch: EventBatch) -> bytes:
        is_held.set()
        assert may_go_on.wait(WAIT_S)
        return msgspec.msgpack.encode((batch.ts, [], 0))

    monkeypatch.setattr("kvscope_telemetry.kv_events.event_publisher.encode_batch", held)
    publisher = publish(max_queue_size=3)
    publisher.publish([stored(0)])
    assert is_held.wait(WAIT_S)
    for seq in range(1, 10):
        publisher.publish([stored(seq)])
    assert (publisher.num_dropped, publisher.next_seq) == (6, 10)
    may_go_on.set()
    wait_for(lambda: [int.from_bytes(each[2], "big") for each in replay(context, publisher, 0)[:-1]] == [0, 1, 2, 3])
    publisher.publish([stored(10)])
    wait_for(lambda: published_all(context, publisher))
    assert [int.from_bytes(each[2], "big") for each in replay(context, publisher, 0)[:-1]] == [0, 1, 2, 3, 10]


def test_consumer_sees_dropped_batches_as_a_gap(
    publish: Callable[..., KvEventPublisher], watch: Callable[..., WatchedStream]
) -> None:
    publisher = publish()
    publisher.queue.next_seq = 4
    publisher.publish([stored(0)])
    publisher.queue.next_seq = 9
    publisher.publish([stored(1)])
    watched = watch(publisher.endpoint, publisher.replay_endpoint)
    watched.until(lambda: watched.stream.status.seq == 9)
    watched.until(lambda: watched.stream.status.state is StreamState.UNCERTAIN)
    watched.until(lambda: any(isinstance(item, Gap) for item in watched.follower.items))
    gap = next(item for item in watched.follower.items if isinstance(item, Gap))
    assert (gap.first, gap.last) == (5, 8)


def test_kv_event_batch_that_cannot_be_encoded_is_skipped_and_counted(
    context: zmq.Context[Socket], publish: Callable[..., KvEventPublisher]
) -> None:
    publisher = publish()
    publisher.publish([BlockRemoved((1 << 70,), "GPU")])
    publisher.publish([stored(1)])
    wait_for(lambda: published_all(context, publisher))
    assert publisher.num_unsent == 1
    assert [int.from_bytes(each[2], "big") for each in replay(context, publisher, 0)[:-1]] == [1]


def test_last_batches_are_sent_before_close_returns(
    context: zmq.Context[Socket], publish: Callable[..., KvEventPublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvscope_telemetry.kv_events.event_publisher.LINGER_MS", int(1000 * WAIT_S))
    publisher = publish()
    socket = subscriber(context, publisher)
    for seq in range(500):
        publisher.publish([stored(seq)])
    last = publisher.next_seq - 1
    publisher.close()
    seq = -1
    while seq < last:
        assert socket.poll(int(1000 * WAIT_S)), f"nothing after batch {seq} of {last}"
        seq = int.from_bytes(socket.recv_multipart()[1], "big")
    socket.close(linger=0)


def test_publisher_connects_to_a_named_host(
    context: zmq.Context[Socket], publish: Callable[..., KvEventPublisher]
) -> None:
    with context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        socket.bind("tcp://127.0.0.1:0")
        publisher = publish(endpoint=socket.get_string(zmq.LAST_ENDPOINT), bind=None)

        def has_come() -> bool:
            publisher.publish([stored(0)])
            return bool(socket.poll(20))

        wait_for(has_come)


def test_kv_events_port_is_increased_by_the_rank_number(publish: Callable[..., KvEventPublisher]) -> None:
    def both(port: int) -> KvEventPublisher:
        config = KvEventsConfig(endpoint=f"tcp://127.0.0.1:{port}", bind=True, enable_kv_cache_events=True)
        return KvEventPublisher(config, rank=1)

    first = publish(replay_endpoint=None)
    port = int(first.endpoint.rpartition(":")[2])
    try:
        with both(port) as second:
            assert second.endpoint == f"tcp://127.0.0.1:{port + 1}"
    except (EndpointInUse, BadInput):
        pytest.skip("the next port is in use")


def test_endpoint_in_use_is_reported(publish: Callable[..., KvEventPublisher]) -> None:
    first = publish()
    with pytest.raises(EndpointInUse, match="in use"):
        publish(endpoint=first.endpoint)
    with pytest.raises(EndpointInUse, match="in use"):
        publish(replay_endpoint=first.endpoint)
    with pytest.raises(BadInput, match="is not accepted"):
        publish(endpoint="ipc:///nowhere/at/all")


def test_closed_publisher_publishes_nothing_and_leaves_no_thread(publish: Callable[..., KvEventPublisher]) -> None:
    before = set(threading.enumerate())
    publisher = publish()
    assert set(threading.enumerate()) - before
    publisher.close()
    publisher.publish([stored(0)])
    publisher.close()
    assert publisher.next_seq == 0
    assert set(threading.enumerate()) <= before


def test_close_removes_its_own_socket_files_only(publish: Callable[..., KvEventPublisher], tmp_path: Path) -> None:
    paths = [tmp_path / "events", tmp_path / "replay"]
    publisher = publish(endpoint=f"ipc://{paths[0]}", replay_endpoint=f"ipc://{paths[1]}")
    assert all(path.is_socket() for path in paths)
    paths[1].rename(tmp_path / "ours")
    paths[1].touch()
    publisher.close()
    assert not paths[0].exists()
    assert paths[1].exists()
