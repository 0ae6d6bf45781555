"""Streams over real sockets: both replay layouts, restarts, foreign publishers, and closing."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq
from tests.telemetry.kv_events.conftest import FakePublisher, WatchedStream

from kvscope_telemetry.errors import BadInput, EndpointInUse
from kvscope_telemetry.kv_events.batches import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent
from kvscope_telemetry.kv_events.encoding import encode_batch
from kvscope_telemetry.kv_events.event_stream import KvEventStream, PendingItems
from kvscope_telemetry.kv_events.stream_items import Gap, Received, Reset, StreamState

Fake = Callable[..., FakePublisher]
Watch = Callable[..., WatchedStream]
LIVE, UNCERTAIN, LOST = StreamState.LIVE, StreamState.UNCERTAIN, StreamState.LOST
NEVER_S = 3600.0
"""Interval of checks that must not happen during a test."""


def stored(*hashes: int) -> BlockStored:
    return BlockStored(hashes, None, tuple(range(len(hashes))), 1, medium="GPU")


def batch(*events: KvEvent, ts: float = 1.0, arrays: bool = False) -> bytes:
    return encode_batch(EventBatch(ts, events, 0), arrays=arrays)


@pytest.mark.parametrize("new_layout", [True, False], ids=["new", "old"])
def test_late_stream_gets_all_earlier_batches(fake: Fake, watch: Watch, new_layout: bool) -> None:
    publisher = fake(new_layout=new_layout)
    for seq in range(50):
        publisher.publish(seq, batch(stored(seq + 1), arrays=not new_layout))
    publisher.publish(50, batch(BlockRemoved((1,), "GPU")))
    watched = watch(publisher.endpoint, publisher.replay_endpoint, topic="kv")
    watched.until(lambda: watched.stream.status.state is LIVE, publisher)
    publisher.publish(51, batch(stored(99)))
    watched.until(lambda: watched.stream.status.seq == 51, publisher)
    watched.until(lambda: 99 in watched.follower.cached, publisher)
    assert watched.follower.cached == {*range(2, 51), 99}
    status = watched.stream.status
    assert (status.state, status.num_batches, status.num_replays, status.data_parallel_rank) == (LIVE, 52, 1, 0)


def test_missing_kv_event_batch_is_filled_by_a_replay_over_sockets(fake: Fake, watch: Watch) -> None:
    publisher = fake()
    watched = watch(publisher.endpoint, publisher.replay_endpoint, check_after_s=NEVER_S)
    watched.until(lambda: watched.stream.status.why == "nothing published yet" or _is_live(watched), publisher)
    publisher.publish(0, batch(stored(1)))
    watched.until(lambda: watched.stream.status.seq == 0, publisher)
    publisher.buffer.append((1, batch(stored(2))))
    publisher.publish(2, batch(stored(3)))
    watched.until(lambda: watched.stream.status.seq == 2 and _is_live(watched), publisher)
    watched.until(lambda: watched.follower.cached == {1, 2, 3}, publisher)
    assert [type(item) for item in watched.follower.items] == [Received] * 3


def test_missed_last_batch_is_found_when_the_publisher_is_quiet(fake: Fake, watch: Watch) -> None:
    publisher = fake()
    publisher.publish(0, batch(stored(1)))
    watched = watch(publisher.endpoint, publisher.replay_endpoint, check_after_s=0.05)
    watched.until(lambda: watched.stream.status.seq == 0, publisher)
    publisher.buffer.append((1, batch(stored(2))))
    watched.until(lambda: watched.stream.status.seq == 1, publisher)
    watched.until(lambda: watched.follower.cached == {1, 2}, publisher)
    assert [type(item) for item in watched.follower.items] == [Received] * 2


@pytest.mark.parametrize("missed", [0, 1, 3])
def test_publisher_restart_is_followed(
    fake: Fake, watch: Watch, make_endpoint: Callable[[str], str], missed: int
) -> None:
    endpoint = make_endpoint("ipc")
    replay_endpoint = f"{endpoint}-replay"
    before = fake(endpoint, replay_endpoint)
    for seq in range(2):
        before.publish(seq, batch(stored(seq + 1)))
    watched = watch(endpoint, replay_endpoint, check_after_s=0.05)
    watched.until(lambda: watched.follower.cached == {1, 2}, before)
    before.close()
    watched.until(lambda: watched.stream.status.state is LOST)
    after = fake(endpoint, replay_endpoint)
    for seq in range(missed):
        after.publish(seq, batch(stored(100 + seq), ts=2.0))
    watched.until(lambda: watched.stream.status.num_restarts > 0, after)
    watched.until(lambda: _is_live(watched) and watched.stream.status.seq == missed - 1, after)
    watched.until(lambda: watched.follower.cached == {100 + seq for seq in range(missed)}, after)
    assert any(isinstance(item, Reset) for item in watched.follower.items)


def test_state_without_a_replay_endpoint_is_uncertain_until_cleared(fake: Fake, watch: Watch) -> None:
    publisher = fake()
    watched = watch(publisher.endpoint)
    publisher.await_subscriber()
    publisher.publish(7, batch(stored(1)))
    watched.until(lambda: watched.stream.status.state is UNCERTAIN)
    assert "before batch 7" in watched.stream.status.why
    publisher.publish(9, batch(stored(2)))
    watched.until(lambda: any(isinstance(item, Gap) for item in watched.follower.items))
    publisher.publish(10, batch(AllBlocksCleared(), stored(3)))
    watched.until(lambda: watched.stream.status.state is LIVE)
    watched.until(lambda: watched.follower.cached == {3})
    assert watched.stream.status.num_missing == 1


def test_silent_replay_endpoint_is_reported_and_retried(fake: Fake, watch: Watch) -> None:
    publisher = fake()
    watched = watch(publisher.endpoint, publisher.replay_endpoint, replay_timeout_s=0.2)
    publisher.await_subscriber()
    publisher.publish(0, batch(stored(1)))
    watched.until(lambda: watched.stream.status.state is UNCERTAIN)
    assert watched.stream.status.why == f"the replay endpoint {publisher.replay_endpoint} does not answer"
    watched.until(lambda: watched.follower.cached == {1})
    watched.until(lambda: _is_live(watched), publisher)
    watched.until(lambda: watched.follower.cached == {1}, publisher)


def test_damaged_kv_event_batch_is_requested_again_over_sockets(fake: Fake, watch: Watch) -> None:
    publisher = fake()
    watched = watch(publisher.endpoint, publisher.replay_endpoint, check_after_s=NEVER_S)
    publisher.await_subscriber()
    publisher.buffer.append((0, batch(stored(1))))
    publisher.send(b"", bytes(8), b"\xc1spoilt")
    watched.until(lambda: watched.stream.status.seq == 0 and _is_live(watched), publisher)
    watched.until(lambda: watched.follower.cached == {1}, publisher)


def test_publisher_of_other_data_is_reported(fake: Fake, watch: Watch) -> None:
    publisher = fake()
    watched = watch(publisher.endpoint)
    publisher.await_subscriber()
    for parts in ([b"one"], [b"a", b"b"], [b"", b"short", b""], [b"", b"\xff" * 8, b""], [b"1", b"2", b"3", b"4"]):
        publisher.send(*parts)
    watched.until(lambda: watched.stream.status.num_malformed == 5)
    status = watched.stream.status
    assert (status.state, status.why) == (LOST, f"{publisher.endpoint} sends something other than KV events")
    publisher.publish(0, batch(stored(1)))
    watched.until(lambda: watched.stream.status.state is LIVE)


class _Page(http.server.BaseHTTPRequestHandler):
    def log_message(self, *parts: object) -> None:
        pass


@pytest.fixture
def web_server() -> Iterator[str]:
    """Address of an HTTP server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"tcp://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_web_server_is_reported_as_no_publisher(web_server: str, watch: Watch) -> None:
    watched = watch(web_server, web_server)
    watched.until(lambda: watched.stream.status.state is LOST)
    assert "does not publish KV events" in watched.stream.status.why
    assert watched.follower.items == []


def test_web_server_as_replay_endpoint_leaves_the_state_uncertain(fake: Fake, watch: Watch, web_server: str) -> None:
    publisher = fake()
    watched = watch(publisher.endpoint, web_server, replay_timeout_s=0.2)
    publisher.await_subscriber()
    publisher.publish(0, batch(stored(1)))
    watched.until(lambda: watched.stream.status.state is UNCERTAIN)
    watched.until(lambda: watched.follower.cached == {1})


def test_socket_of_another_type_is_reported_as_no_publisher(
    context: zmq.Context[zmq.Socket[bytes]], watch: Watch
) -> None:
    with context.socket(zmq.PULL) as pull:
        pull.bind("tcp://127.0.0.1:0")
        endpoint = pull.get_string(zmq.LAST_ENDPOINT)
        watched = watch(endpoint)
        watched.until(lambda: watched.stream.status.state is LOST)
        assert "does not publish KV events" in watched.stream.status.why


def test_bound_stream_waits_for_a_connecting_publisher(
    context: zmq.Context[zmq.Socket[bytes]], watch: Watch, make_endpoint: Callable[[str], str]
) -> None:
    endpoint = make_endpoint("ipc")
    watched = watch(endpoint, bind=True)
    with context.socket(zmq.XPUB) as publisher:
        publisher.connect(endpoint)
        assert publisher.poll(60_000)
        publisher.send_multipart((b"", bytes(8), batch(stored(5))))
        watched.until(lambda: watched.follower.cached == {5})
        assert watched.stream.status.state is LIVE


def test_slow_consumer_loses_nothing_with_bounded_memory(fake: Fake, watch: Watch) -> None:
    publisher = fake()
    watched = watch(publisher.endpoint, publisher.replay_endpoint, pending=PendingItems(max_bytes=10_000))
    publisher.await_subscriber()
    hashes = [tuple(range(1000 * seq + 1, 1000 * seq + 200)) for seq in range(100)]
    for seq in range(100):
        publisher.publish(seq, batch(stored(*hashes[seq])))
    watched.until(lambda: watched.stream.status.seq == 99 and _is_live(watched), publisher)
    watched.until(lambda: watched.follower.cached == {each for run in hashes for each in run}, publisher)


@pytest.mark.parametrize(
    "endpoint", ["", "tcp://", "tcp://host", "tcp://*:5557", "tcp://h:0", "tcp://h:99999", "udp://h:1"]
)
def test_invalid_kv_events_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(BadInput, match="is not accepted"):
        KvEventStream(endpoint)
    with pytest.raises(BadInput, match="is not accepted"):
        KvEventStream("tcp://127.0.0.1:5557", endpoint)


def test_bind_endpoint_in_use_is_refused(fake: Fake) -> None:
    publisher = fake()
    with pytest.raises(EndpointInUse, match="in use"):
        KvEventStream(publisher.endpoint, bind=True)


def test_closing_a_kv_event_stream_returns_promptly_and_leaves_no_thread(
    fake: Fake, make_endpoint: Callable[[str], str]
) -> None:
    publisher = fake()
    for endpoint in (publisher.endpoint, make_endpoint("ipc")):
        before = set(threading.enumerate())
        stream = KvEventStream(endpoint, publisher.replay_endpoint)
        assert set(threading.enumerate()) - before
        stream.close()
        stream.close()
        assert set(threading.enumerate()) <= before


def _is_live(watched: WatchedStream) -> bool:
    return watched.stream.status.state is LIVE
