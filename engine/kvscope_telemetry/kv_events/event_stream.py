"""Receives KV events of one publisher: vLLM, SGLang or kvscope.

Owns the sockets and the thread that reads them, and decides when a replay is requested, abandoned and retried.
`event_continuity` decides how batches relate to each other, `publisher_choice` which publisher is read if several
publish to one endpoint.
"""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType
from typing import Final, Self

import zmq

from kvscope_telemetry.kv_events.batches import END_SEQ
from kvscope_telemetry.kv_events.event_connection import KVEventConnection
from kvscope_telemetry.kv_events.event_continuity import EventContinuity
from kvscope_telemetry.kv_events.event_endpoints import check_endpoint, is_ipv6
from kvscope_telemetry.kv_events.event_wire import MAX_BATCH_BYTES
from kvscope_telemetry.kv_events.publisher_choice import Choice, PublisherChoice
from kvscope_telemetry.kv_events.stream_items import StreamItem, StreamState, StreamStatus
from kvscope_telemetry.transport.wakeup import Wakeup

HIGH_WATER: Final = 256
"""Size of a replay's receive queue in batches. Publishers before vLLM 0.26 drop batches beyond 1,000 unread ones."""
NEW_PARTS: Final = 4
OLD_PARTS: Final = 3
SEQ_BYTES: Final = 8
MAX_PENDING_BYTES: Final = 16 << 20
"""Maximum bytes of pending items as received. Decoded, they take about ten times as much memory."""
_ITEM_BYTES: Final = 256
POLL_MS: Final = 100
MAX_PER_PASS: Final = 256
CHECK_AFTER_S: Final = 5.0
"""Seconds without a batch after which a replay is requested, to check whether batches were missed."""
REPLAY_TIMEOUT_S: Final = 10.0
"""Maximum seconds between two answers of a replay, after which the replay is abandoned."""
RETRY_S: Final = (1.0, 30.0)
"""Pauses in seconds after an unanswered replay: the first one, which doubles each time, and the maximum."""


class KvEventStream:
    """Stream of KV events of the publisher at `endpoint`, across its restarts. A context manager that closes it on
    exit.

    The publisher may start later. `replay_endpoint` serves replays; None if there are none. With `bind`, the publisher
    connects to this process. If several publish to the endpoint, `topic` and `publisher_host` determine which one is
    read (`PublisherChoice`); if they do not, `StreamStatus.ambiguous_topics` names all. A data-parallel engine needs
    one stream per rank (`event_endpoints.of_rank`). Raises BadInput for an invalid endpoint, EndpointInUse for an
    endpoint to bind that is in use.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        publisher_host: str = "",
        bind: bool = False,
        check_after_s: float = CHECK_AFTER_S,
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
        pending: PendingItems | None = None,
    ) -> None:
        check_endpoint("endpoint", endpoint, is_client=not bind)
        if replay_endpoint is not None:
            check_endpoint("replay endpoint", replay_endpoint, is_client=True)
        self.endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._check_after_s, self._replay_timeout_s = check_after_s, replay_timeout_s
        self._pending = pending or PendingItems()
        self._continuity = EventContinuity(self._pending.put, can_replay=replay_endpoint is not None)
        self._choice = PublisherChoice(topic.encode(), publisher_host.encode())
        self._status = StreamStatus()
        self._num_malformed = 0
        self._num_connections = 0
        self._replay: ReplayClient | None = None
        self._last_message_s = self._last_answer_s = time.monotonic()
        self._retry_s = 0.0
        self._pause_s = RETRY_S[0]
        self._is_closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._connection = KVEventConnection(self._context, endpoint, topic.encode(), bind=bind)
        except BaseException:
            self._context.term()
            raise
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="kvscope-kv-stream", daemon=True)
        self._thread.start()

    @property
    def status(self) -> StreamStatus:
        """Current status. It is at least as new as all items that `poll_items` has returned."""
        return self._status

    def poll_items(self) -> list[StreamItem]:
        """Return and clear the items received since the last call, in order. Must be called on one thread only."""
        items = self._pending.poll_items()
        if items:
            self._wakeup.signal()  # the queue has free capacity again
        return items

    def close(self) -> None:
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

    # Reading thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._wait()
                now_s = time.monotonic()
                self._connection.poll(now_s)
                self._check_reconnection()
                self._read_published(now_s)
                self._read_replay(now_s)
                self._start_due_replay(now_s)
                self._status = self._read_status()
        finally:
            self._end_replay()
            self._connection.close()
            self._context.term()

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup.reader, zmq.POLLIN)
        poller.register(self._connection.socket, zmq.POLLIN)
        poller.register(self._connection.monitor, zmq.POLLIN)
        if self._replay is not None and self._pending.has_capacity:
            poller.register(self._replay.socket, zmq.POLLIN)
        if self._wakeup.reader in dict(poller.poll(POLL_MS)):
            self._wakeup.clear()

    def _check_reconnection(self) -> None:
        if self._connection.num_connections > self._num_connections:
            if self._num_connections:
                self._continuity.reconnected()
            self._num_connections = self._connection.num_connections
        if not self._connection.is_connected:
            self._choice.forget()

    def _read_published(self, now_s: float) -> None:
        for parts in self._connection.receive(MAX_PER_PASS):
            published = read_published(parts)
            if published is None:
                self._num_malformed += 1
                continue
            choice = self._choice.choose(parts[0])
            if choice is Choice.IGNORE:
                continue
            if choice is Choice.SWITCH:
                self._continuity.switch_publisher()
            if self._pending.has_capacity:
                self._last_message_s = now_s
                self._continuity.live(*published)
            else:
                self._last_message_s = now_s
                self._continuity.dropped()

    def _read_replay(self, now_s: float) -> None:
        replay = self._replay
        if replay is None:
            return
        if not self._pending.has_capacity:
            self._last_answer_s = now_s  # this process delays the replay, not the publisher
            return
        for answer in replay.receive(MAX_PER_PASS):
            self._last_answer_s = now_s
            self._continuity.replayed(*answer)
        if replay.is_over:
            self._pause_s = RETRY_S[0]
            self._last_message_s = now_s
            self._continuity.end_replay()
        elif now_s - self._last_answer_s > self._replay_timeout_s:
            self._abandon_replay(now_s)
        if not self._continuity.is_replaying:
            self._end_replay()

    def _abandon_replay(self, now_s: float) -> None:
        self._last_message_s = now_s
        self._continuity.fail_replay(f"the replay endpoint {self._replay_endpoint} does not answer")
        self._retry_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, RETRY_S[1])

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._num_malformed += self._replay.num_malformed
            self._replay.close()
            self._replay = None

    def _start_due_replay(self, now_s: float) -> None:
        """Start a replay if one is due. It waits for a connection, from which on no published batch is missed."""
        continuity = self._continuity
        if self._replay is not None or not self._connection.is_connected or not self._pending.has_capacity:
            return
        if continuity.failed and now_s >= self._retry_s:
            continuity.try_again()
        elif now_s - self._last_message_s > self._check_after_s and not continuity.failed:
            continuity.check()
        if continuity.wants and self._replay_endpoint is not None:
            self._last_answer_s = now_s
            self._replay = ReplayClient(self._context, self._replay_endpoint, continuity.begin_replay())

    def _read_status(self) -> StreamStatus:
        continuity, counts = self._continuity, self._continuity.counts
        state, why = self._state()
        return StreamStatus(
            state=state,
            why=why,
            seq=continuity.last,
            ts=continuity.ts,
            data_parallel_rank=continuity.rank,
            num_batches=counts.batches,
            num_events=counts.events,
            num_missing=counts.missing,
            num_unreadable=counts.unreadable,
            num_unknown_events=counts.unknown_events,
            num_unknown_fields=counts.unknown_fields,
            num_duplicates=counts.duplicates,
            num_restarts=counts.restarts,
            num_replays=counts.replays,
            num_malformed=self._num_malformed,
            ambiguous_topics=self._choice.ambiguous_topics,
        )

    def _state(self) -> tuple[StreamState, str]:
        connection, continuity = self._connection, self._continuity
        if not connection.is_connected:
            state = StreamState.LOST if connection.num_connections or connection.refusal else StreamState.JOINING
            return state, connection.refusal or f"nobody publishes at {self.endpoint}"
        if self._num_malformed and not continuity.counts.batches:
            return StreamState.LOST, f"{self.endpoint} sends something other than KV events"
        is_asking = bool(continuity.wants) or continuity.is_replaying
        if is_asking and not continuity.is_checking:
            return StreamState.REPLAYING, continuity.uncertain or continuity.wants
        if connection.num_open > 1 and continuity.counts.restarts and not self._choice.has_several:
            topic = (self._choice.chosen or b"").decode("utf-8", "replace")
            why = f"{connection.num_open} engines publish with the same topic {topic!r}: give each its own topic"
            return StreamState.UNCERTAIN, why
        if continuity.uncertain:
            return StreamState.UNCERTAIN, continuity.uncertain
        return (StreamState.LIVE, "") if continuity.has_joined else (StreamState.JOINING, "nothing published yet")


class PendingItems:
    """Queue of items from the reading thread to the consumer, bounded by the bytes received for them.

    `put` must be called on one thread, `poll_items` on one other.
    """

    def __init__(self, max_bytes: int = MAX_PENDING_BYTES) -> None:
        self._lock = threading.Lock()
        self._items: list[StreamItem] = []
        self._num_bytes = 0
        self._max_bytes = max_bytes

    @property
    def has_capacity(self) -> bool:
        return self._num_bytes < self._max_bytes

    def put(self, item: StreamItem, num_bytes: int) -> None:
        with self._lock:
            self._items.append(item)
            self._num_bytes += num_bytes + _ITEM_BYTES

    def poll_items(self) -> list[StreamItem]:
        with self._lock:
            items, self._items = self._items, []
            self._num_bytes = 0
        return items


class ReplayClient:
    """Request to a publisher for all batches that it still has, from sequence number `start` on.

    Reads answers in the layouts before and since vLLM 0.26. Each replay has a separate socket, so that late answers to
    an abandoned replay are dropped with it.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, start: int) -> None:
        self.is_over = False
        """Whether the end of the replay was received."""
        self.num_malformed = 0
        self.socket = context.socket(zmq.DEALER)
        self.socket.rcvhwm = HIGH_WATER
        self.socket.maxmsgsize = MAX_BATCH_BYTES
        self.socket.linger = 0
        self.socket.ipv6 = is_ipv6(endpoint)
        self.socket.connect(endpoint)
        self.socket.send_multipart((b"", start.to_bytes(SEQ_BYTES, "big")), zmq.NOBLOCK)

    def receive(self, max_answers: int) -> list[tuple[int, bytes]]:
        """Return the received batches in the order in which they were sent, as (sequence number, payload)."""
        answers: list[tuple[int, bytes]] = []
        with contextlib.suppress(zmq.Again):
            while len(answers) < max_answers and not self.is_over:
                answer = read_answer(self.socket.recv_multipart(zmq.NOBLOCK))
                if answer is None:
                    self.num_malformed += 1
                elif answer[0] is None:
                    self.is_over = True
                else:
                    answers.append((answer[0], answer[1]))
        return answers

    def close(self) -> None:
        self.socket.close(linger=0)


def read_answer(parts: list[bytes]) -> tuple[int | None, bytes] | None:
    """Return the sequence number and payload, (None, b"") at the end of a replay, or None for a malformed answer.

    Since vLLM 0.26 and SGLang 0.5.23 an answer has four parts: empty, topic, number, payload. Before it had three,
    without a topic.
    """
    if len(parts) not in (NEW_PARTS, OLD_PARTS) or parts[0] or len(parts[-2]) != SEQ_BYTES:
        return None
    if parts[-2] == END_SEQ:
        return None, b""
    return int.from_bytes(parts[-2], "big"), parts[-1]


def read_published(parts: list[bytes]) -> tuple[int, bytes] | None:
    """Return the sequence number and payload of a published message (topic, number, payload); None if it is
    malformed.
    """
    if len(parts) != OLD_PARTS or len(parts[1]) != SEQ_BYTES or parts[1] == END_SEQ:
        return None
    return int.from_bytes(parts[1], "big"), parts[2]
