"""Several publishers of KV events that connect to one endpoint: one is read, and the others are reported."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
import zmq
from tests.telemetry.kv_events.conftest import WatchedStream
from tests.telemetry.kv_events.test_stream import batch, stored

from kvscope_telemetry.kv_events.stream_items import Reset, StreamState

Watch = Callable[..., WatchedStream]
Connect = Callable[..., Callable[..., None]]
A, B = b"kv@10.0.0.5:8000@m", b"kv@10.0.0.6@m"


@pytest.fixture
def bound_endpoint() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def connect(context: zmq.Context[zmq.Socket[bytes]], bound_endpoint: str) -> Iterator[Connect]:
    """Function that connects a publisher with a topic, and returns a function that publishes stored blocks."""
    publishers: list[zmq.Socket[bytes]] = []

    def make(topic: bytes) -> Callable[..., None]:
        publisher = context.socket(zmq.XPUB)
        publishers.append(publisher)
        publisher.connect(bound_endpoint)
        assert publisher.poll(60_000), "nobody subscribed"
        publisher.recv()

        def publish(seq: int, *hashes: int) -> None:
            publisher.send_multipart([topic, seq.to_bytes(8, "big"), batch(stored(*hashes))])

        return publish

    yield make
    for each in publishers:
        each.close(linger=0)


def test_publishers_with_different_topics_are_not_mixed_and_all_topics_are_reported(
    watch: Watch, connect: Connect, bound_endpoint: str
) -> None:
    watched = watch(bound_endpoint, bind=True)
    publish_a, publish_b = connect(A), connect(B)
    publish_a(0, 1)
    watched.until(lambda: watched.follower.cached == {1})
    for seq in range(4):
        publish_b(seq, 100 + seq)
    watched.until(lambda: watched.stream.status.ambiguous_topics == (A.decode(), B.decode()))
    publish_a(1, 2)
    watched.until(lambda: watched.follower.cached == {1, 2})
    status = watched.stream.status
    assert (status.state, status.num_restarts, status.num_batches) == (StreamState.LIVE, 0, 2)


@pytest.mark.parametrize("chosen", [{"topic": B.decode()}, {"publisher_host": "10.0.0.6"}], ids=["topic", "host"])
def test_publisher_with_the_given_topic_or_host_is_read(
    chosen: dict[str, str], watch: Watch, connect: Connect, bound_endpoint: str
) -> None:
    watched = watch(bound_endpoint, bind=True, **chosen)
    publish_b = connect(B)
    if "topic" not in chosen:  # a topic is subscribed, so that nothing else arrives
        connect(A)(0, 1)
        watched.until(lambda: watched.follower.cached == {1})
    publish_b(0, 100)
    watched.until(lambda: watched.follower.cached == {100})
    assert sum(isinstance(item, Reset) for item in watched.follower.items) == ("topic" not in chosen)
    assert watched.stream.status.ambiguous_topics == ()
    assert watched.stream.status.num_restarts == 0


def test_topic_that_others_begin_with_can_be_chosen(watch: Watch, connect: Connect, bound_endpoint: str) -> None:
    watched = watch(bound_endpoint, bind=True, topic="kv")
    publish_longer, publish = connect(b"kv-2"), connect(b"kv")
    publish_longer(0, 1)
    watched.until(lambda: watched.follower.cached == {1})
    publish(0, 100)
    watched.until(lambda: watched.follower.cached == {100})
    assert watched.stream.status.ambiguous_topics == ()
    assert watched.stream.status.num_restarts == 0


def test_publishers_with_the_same_topic_are_reported(watch: Watch, connect: Connect, bound_endpoint: str) -> None:
    watched = watch(bound_endpoint, bind=True)
    publish_a, publish_b = connect(b"kv-events"), connect(b"kv-events")
    for seq in range(3):
        publish_a(seq, 1 + seq)
    watched.until(lambda: watched.follower.cached == {1, 2, 3})
    publish_b(0, 100)
    watched.until(lambda: watched.stream.status.state is StreamState.UNCERTAIN)
    assert watched.stream.status.why == "2 engines publish with the same topic 'kv-events': give each its own topic"


def test_restarted_publisher_may_have_another_topic(
    watch: Watch, connect: Connect, bound_endpoint: str, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    watched = watch(bound_endpoint, bind=True)
    before = context.socket(zmq.XPUB)
    before.connect(bound_endpoint)
    assert before.poll(60_000)
    before.send_multipart([A, (0).to_bytes(8, "big"), batch(stored(1))])
    watched.until(lambda: watched.follower.cached == {1})
    before.close(linger=0)
    watched.until(lambda: watched.stream.status.state is StreamState.LOST)
    connect(B)(1, 100)
    watched.until(lambda: watched.follower.cached == {100})
    assert watched.stream.status.ambiguous_topics == ()
