"""Publishers that stand in for vLLM and SGLang on real sockets, and waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from tests.telemetry.kv_events.follower import Follower

from kvscope_telemetry.kv_events.batches import END_SEQ
from kvscope_telemetry.kv_events.event_stream import KvEventStream

ANY = "tcp://127.0.0.1:0"
WAIT_S = 60.0
"""Timeout of every wait. Passing tests never wait this long."""


def wait_for(condition: Callable[[], object], what: Callable[[], object] = lambda: "") -> None:
    """Wait until `condition` holds; fail with `what` after the timeout."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.005)


class FakePublisher:
    """PUB and ROUTER sockets of an engine, on the test's thread: replays are sent when `answer` is called."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, replay_endpoint: str, *, new_layout: bool
    ) -> None:
        self.new_layout = new_layout
        self.buffer: list[tuple[int, bytes]] = []
        self.publisher = context.socket(zmq.XPUB)
        self.publisher.xpub_verbose = True
        self.publisher.bind(endpoint)
        self.endpoint = self.publisher.get_string(zmq.LAST_ENDPOINT)
        self.router = context.socket(zmq.ROUTER)
        self.router.bind(replay_endpoint)
        self.replay_endpoint = self.router.get_string(zmq.LAST_ENDPOINT)

    def await_subscriber(self) -> None:
        assert self.publisher.poll(int(1000 * WAIT_S)), "nobody subscribed"
        self.publisher.recv()

    def publish(self, seq: int, payload: bytes, topic: bytes = b"kv-events") -> None:
        self.buffer.append((seq, payload))
        self.send(topic, seq.to_bytes(8, "big"), payload)

    def send(self, *parts: bytes) -> None:
        self.publisher.send_multipart(parts)

    def answer(self, timeout_ms: int = 0) -> int | None:
        """Answer one pending replay request and return the number it starts from, or None if there is none."""
        if not self.router.poll(timeout_ms):
            return None
        client, empty, start = self.router.recv_multipart()
        assert empty == b""
        first = int.from_bytes(start, "big")
        topic = [b"kv-events"] if self.new_layout else []
        for seq, payload in self.buffer:
            if seq >= first:
                self.router.send_multipart([client, b"", *topic, seq.to_bytes(8, "big"), payload])
        self.router.send_multipart([client, b"", *([b""] if self.new_layout else []), END_SEQ, b""])
        return first

    def close(self) -> None:
        self.publisher.close(linger=0)
        self.router.close(linger=0)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made
        made.destroy(linger=0)


@pytest.fixture
def fake(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Callable[..., FakePublisher]]:
    """Function that makes a publisher: `fake(endpoint, replay_endpoint, new_layout=…)`."""
    made: list[FakePublisher] = []

    def make(endpoint: str = ANY, replay_endpoint: str = ANY, *, new_layout: bool = True) -> FakePublisher:
        made.append(FakePublisher(context, endpoint, replay_endpoint, new_layout=new_layout))
        return made[-1]

    yield make
    for each in made:
        each.close()


class WatchedStream:
    """A KV event stream and the follower of its events."""

    def __init__(self, stream: KvEventStream) -> None:
        self.stream = stream
        self.follower = Follower()

    def until(self, condition: Callable[[], object], publisher: FakePublisher | None = None) -> None:
        """Receive events, and let `publisher` answer replays, until `condition` holds."""

        def look() -> object:
            if publisher is not None:
                publisher.answer()
            self.follower.take(self.stream.poll_items())
            return condition()

        wait_for(look, lambda: (self.stream.status, self.follower.items[-3:]))


@pytest.fixture
def watch() -> Iterator[Callable[..., WatchedStream]]:
    """Function that follows a stream: `watch(endpoint, replay_endpoint, …)`."""
    made: list[KvEventStream] = []

    def start(endpoint: str, replay_endpoint: str | None = None, **options: object) -> WatchedStream:
        made.append(KvEventStream(endpoint, replay_endpoint, **options))  # type: ignore[arg-type]
        return WatchedStream(made[-1])

    yield start
    for each in made:
        each.close()
