"""Publishes KV events as vLLM does: a PUB socket for new events, a ROUTER socket for replays.

Owns both sockets and their thread. Publishing never blocks and never fails: a batch that does not fit in the queue is
dropped, and consumers see a gap at its sequence number.

Anyone with access to the endpoints can read the tokens of prompts, because vLLM's protocol has no authentication.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Final, Self

import zmq

from kvscope_telemetry.errors import BadInput, EndpointInUse
from kvscope_telemetry.kv_events.batches import END_SEQ, BlockStored, EventBatch, KvEvent
from kvscope_telemetry.kv_events.encoding import encode_batch
from kvscope_telemetry.kv_events.event_endpoints import is_ipv6, of_rank
from kvscope_telemetry.kv_events.kv_events_config import KvEventsConfig
from kvscope_telemetry.transport.endpoint_lock import SocketFiles
from kvscope_telemetry.transport.wakeup import Wakeup

MAX_BUFFER_BYTES: Final = 128 << 20
MAX_QUEUED_BYTES: Final = 64 << 20
"""Maximum estimated memory of queued batches, in addition to the limit of their number."""
_EVENT_BYTES: Final = 512
_NUMBER_BYTES: Final = 40
"""Memory of one hash or token in Python, in bytes."""
SEQ_BYTES: Final = 8
MAX_REQUEST_BYTES: Final = 1024
"""Maximum size of a consumer's message in bytes. A replay request has 8."""
MAX_PER_PASS: Final = 256
"""Number of batches published between checks for replay requests."""
LINGER_MS: Final = 500
"""Maximum milliseconds for sending the last batches at shutdown."""
REQUEST_PARTS: Final = 3
"""Number of parts of a replay request: the client's identity, an empty part, and the first sequence number requested.
"""


class KvEventPublisher:
    """Publisher of data-parallel rank `rank`, which adds `rank` to the ports of the configured endpoints.

    The sockets are open when the constructor returns. Raises EndpointInUse for an endpoint in use, BadInput for an
    invalid one.
    """

    def __init__(self, config: KvEventsConfig, rank: int = 0) -> None:
        self._topic = config.topic.encode()
        self._rank = rank
        self.queue = BatchQueue(config.max_queue_size)
        self._buffer = ReplayBuffer(config.buffer_steps)
        self._wakeup = Wakeup()
        self._is_closing = False
        self.num_unsent = 0
        """Number of batches that could not be encoded. Consumers see a gap."""
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        self._files = SocketFiles()
        try:
            self._open(config)
        except BaseException:
            self._context.destroy(linger=0)
            self._files.remove()
            self._wakeup.close()
            raise
        self._thread = threading.Thread(target=self._run, name="kvscope-kv-events", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        return self.queue.num_dropped

    @property
    def next_seq(self) -> int:
        return self.queue.next_seq

    def publish(self, events: Sequence[KvEvent], ts: float | None = None) -> None:
        """Enqueue one batch with time `ts` in seconds since 1970; None means the current time. Non-blocking. Must be
        called on one thread only.
        """
        if self._is_closing or not events:
            return
        self.queue.put(EventBatch(time.time() if ts is None else ts, tuple(events), self._rank))
        self._wakeup.signal()

    def close(self) -> None:
        """Publish the queued batches and close both sockets. Takes little more than `LINGER_MS`. Idempotent."""
        self._is_closing = True
        self._wakeup.signal()
        self._thread.join()
        self._wakeup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, config: KvEventsConfig) -> None:
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.sndhwm = config.hwm
        self.endpoint = _attach(self._publisher, of_rank(config.endpoint, self._rank), bind=config.binds)
        """Endpoint at which batches are published, with the actual port if 0 was configured."""
        if config.binds:
            self._files.record_bound_file(self.endpoint)
        self.replay_endpoint = ""
        """Endpoint that serves replays, with the actual port; empty if there is none."""
        if config.replay_endpoint is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            # ZeroMQ counts messages as read with a delay: twice the number fits a whole replay and its end.
            self._replay.sndhwm = 2 * (config.buffer_steps + 1)
            self.replay_endpoint = _attach(self._replay, of_rank(config.replay_endpoint, self._rank), bind=True)
            self._files.record_bound_file(self.replay_endpoint)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup.reader, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        has_more = False
        try:
            while has_more or not self._is_closing:
                ready = dict(poller.poll(0 if has_more else None))
                if self._wakeup.reader in ready:
                    self._wakeup.clear()
                if self._replay in ready:
                    self._serve_replay()
                has_more = self._publish_some()
            while self._publish_some():
                pass
        finally:
            self._context.destroy(linger=LINGER_MS)
            self._files.remove()

    def _publish_some(self) -> bool:
        """Publish up to `MAX_PER_PASS` batches. Returns whether more may be queued."""
        for _ in range(MAX_PER_PASS):
            item = self.queue.get()
            if item is None:
                return False
            seq, batch = item
            try:
                payload = encode_batch(batch)
            except (ValueError, TypeError, OverflowError):
                self.num_unsent += 1
                continue
            self._publisher.send_multipart((self._topic, _packed(seq), payload))
            if self._replay is not None:
                self._buffer.add(seq, payload)
        return True

    def _serve_replay(self) -> None:
        """Answer one replay request. Malformed requests get no answer, as with vLLM."""
        assert self._replay is not None, "nobody can ask for a replay"
        request = self._replay.recv_multipart()
        if len(request) != REQUEST_PARTS or len(request[2]) != SEQ_BYTES:
            return
        client, start = request[0], int.from_bytes(request[2], "big")
        for seq, payload in self._buffer.since(start):
            self._replay.send_multipart((client, b"", self._topic, _packed(seq), payload))
        self._replay.send_multipart((client, b"", b"", END_SEQ, b""))


def _packed(seq: int) -> bytes:
    return seq.to_bytes(SEQ_BYTES, "big")


def _attach(socket: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> str:
    """Bind or connect a socket. Returns the endpoint with the actual port."""
    socket.maxmsgsize = MAX_REQUEST_BYTES
    socket.ipv6 = is_ipv6(endpoint)
    try:
        if not bind:
            socket.connect(endpoint)
            return endpoint
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise EndpointInUse(f"endpoint {endpoint} of KV events is in use") from None
        raise BadInput(f"endpoint {endpoint} of KV events is not accepted: {error.strerror}") from None
    return str(socket.get_string(zmq.LAST_ENDPOINT))


class BatchQueue:
    """Bounded, non-blocking queue of numbered batches from the engine's thread to the publisher's thread.

    Owns the sequence numbers. A batch that does not fit is dropped but uses up its number, so that consumers see the
    gap. `put` must be called on one thread, `get` on one other.
    """

    def __init__(self, max_batches: int, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, EventBatch, int]] = deque()
        self._num_bytes = 0
        self.next_seq = 0
        self.num_dropped = 0

    def put(self, batch: EventBatch) -> bool:
        """Number the batch and enqueue it. Returns False if it was dropped."""
        num_bytes = sum(map(_size, batch.events))
        with self._lock:
            seq, self.next_seq = self.next_seq, self.next_seq + 1
            has_capacity = len(self._waiting) < self._max_batches and self._num_bytes + num_bytes <= self._max_bytes
            if has_capacity:
                self._waiting.append((seq, batch, num_bytes))
                self._num_bytes += num_bytes
            else:
                self.num_dropped += 1
        return has_capacity

    def get(self) -> tuple[int, EventBatch] | None:
        with self._lock:
            if not self._waiting:
                return None
            seq, batch, num_bytes = self._waiting.popleft()
            self._num_bytes -= num_bytes
        return seq, batch


def _size(event: KvEvent) -> int:
    numbers = len(event.token_ids) + len(event.block_hashes) if isinstance(event, BlockStored) else 0
    return _EVENT_BYTES + _NUMBER_BYTES * numbers


class ReplayBuffer:
    """Holds the newest batches as bytes, at most `max_batches` in `max_bytes`, for consumers that missed some or
    connect late.
    """

    def __init__(self, max_batches: int, max_bytes: int = MAX_BUFFER_BYTES) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._num_bytes = 0

    def add(self, seq: int, payload: bytes) -> None:
        self._batches.append((seq, payload))
        self._num_bytes += len(payload)
        while len(self._batches) > self._max_batches or (self._num_bytes > self._max_bytes and len(self._batches) > 1):
            self._num_bytes -= len(self._batches.popleft()[1])

    def since(self, seq: int) -> Iterator[tuple[int, bytes]]:
        return (item for item in self._batches if item[0] >= seq)
