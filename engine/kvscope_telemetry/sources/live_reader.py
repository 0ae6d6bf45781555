"""The thread of a live engine's source: receives messages, checks the sequence of frames, sends commands, and queues
updates.

Owns the sockets, the synchronization and the liveness. Must not depend on the mirror or on the consumer. One pass
receives up to 512 messages and merges them into at most one update. The thread then sleeps briefly, so that the next
pass receives many messages. Measurements show that this keeps the load of the GUI thread low.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Final

from kvscope_telemetry.errors import ProtocolError, UnknownMessage
from kvscope_telemetry.messages.commands import (
    Abort,
    Failed,
    GetSnapshot,
    GetStatus,
    LoadedAdapter,
    Status,
)
from kvscope_telemetry.messages.devices import Devices
from kvscope_telemetry.messages.telemetry import (
    DeviceSample,
    Frame,
    Goodbye,
    Heartbeat,
    Hello,
    MemoryBreakdown,
    Progress,
    Reading,
    Snapshot,
    TelemetryMessage,
)
from kvscope_telemetry.messages.unknown import Unknowns
from kvscope_telemetry.messages.wire import decode_reply, decode_telemetry, encode, tag_of
from kvscope_telemetry.mirror.coalesce import MAX_ENTRIES, PendingUpdates, coalesce
from kvscope_telemetry.mirror.extras import Extras
from kvscope_telemetry.mirror.sync import FIRST_TAG, FrameRun, Sync
from kvscope_telemetry.mirror.whole_blocks import WholeBlocks
from kvscope_telemetry.source import SourceState, SourceStatus
from kvscope_telemetry.sources.liveness import Liveness
from kvscope_telemetry.sources.reply_queue import ReplyQueue
from kvscope_telemetry.sources.sink import Sink, SinkFeed
from kvscope_telemetry.transport.client_sockets import MAX_READ_BYTES, AwaitedRequests, ClientSockets, Outgoing
from kvscope_telemetry.transport.host_id import host_id

MAX_MESSAGES_A_PASS: Final = 512
NAP_S: Final = 0.008
"""Seconds to sleep after each pass, so that there are about two passes per display frame. A pass costs as much
time as about ten messages.
"""
TICK_MS: Final = 100  # poll timeout while something is outstanding
CALM_TICK_MS: Final = 250
"""Poll timeout while no request or command is outstanding. Messages and disconnections end the poll immediately
in any case.
"""
NAP_AFTER_NS: Final = 100_000_000
"""Length of a silence after which the first message is processed without a sleep, because it is rarely followed
by many.
"""
ASK_STATUS_NS: Final = 500_000_000
ASK_ROLE_NS: Final = 5_000_000_000
"""Interval between status requests to a healthy engine. They are needed because the client's role may have been
changed.
"""
QUIET_NS: Final = 250_000_000
"""Time after connecting at which a snapshot is requested even if no message has arrived.

A message that arrives earlier triggers the request immediately. It proves that the subscription is in effect, so that
no frame after the snapshot can be missed.
"""
SENDS_TOO_MUCH: Final = (
    "the engine sends more than can be read, or messages that kvscope does not know: it was disconnected"
)
_STATE_MESSAGES: Final = (Hello.__name__, Snapshot.__name__, Frame.__name__)
MAX_LATENCY_NS: Final = 3_600_000_000_000
"""Maximum plausible latency. A larger difference means that the two clocks are not comparable."""

Taker = Callable[[list[FrameRun]], None]
"""Callback that receives snapshots and the frames that follow them, in order. Called on the reading thread."""


class LiveReader:
    """The reading thread's work (`run`) and its state, including the parts that other threads may access.

    With a `taker`, snapshots and frames are passed to it instead of being merged and queued in `pending`. A thread that
    serves many readers then calls `poll` repeatedly and `finish` at the end, instead of `run`.
    """

    def __init__(
        self,
        sockets: ClientSockets,
        sink: Sink | None = None,
        nap_s: float = NAP_S,
        taker: Taker | None = None,
        max_entries: int = MAX_ENTRIES,
    ) -> None:
        self._taker = taker
        self.feed = SinkFeed(sink)
        self.pending = PendingUpdates(max_entries)
        self.outgoing = Outgoing()
        self.replies = ReplyQueue()
        self.changed = threading.Condition()
        """Condition that is notified after each pass in which messages arrived."""
        self.prompt_api_address = ""
        """Address of the API for prompts (`Hello.api`); empty if the command socket accepts prompts."""
        self._sockets = sockets
        self._nap_s = nap_s
        self._sync = Sync(self.feed.add_accepted)
        self._awaited = AwaitedRequests()
        self._session = secrets.token_hex(16)
        self._num_introduced = 0  # number of the latest connection on which the session was sent
        self._role, self._intervenes = "", False
        self._adapters: tuple[LoadedAdapter, ...] | None = None
        self._takes_adapters = False
        self.is_same_machine = sockets.is_ipc
        self._liveness = Liveness(is_local=sockets.is_ipc)
        self._closing = False
        self._resync_wanted = False
        self._frames_received = 0
        self._messages_rejected = 0
        self._unknowns = Unknowns()
        self._latency_ns = -1
        self._connected_ns = 0
        self._polled_ns = self._received_ns = 0
        self._status_requested_ns = 0
        self._failure = ""
        self._num_cut_connections = 0
        self._num_rows = 0  # number of rows of the latest prepared ledger
        self._extras = Extras()

    # Methods for any thread.

    def stop(self) -> None:
        self._closing = True
        self._sockets.wake()

    def wake(self) -> None:
        """Let the thread send the commands in `outgoing` immediately."""
        self._sockets.wake()

    def resync(self) -> None:
        """Request a snapshot, because the consumer's state is invalid. No frames are passed on before it
        arrives. Thread-safe.
        """
        self._resync_wanted = True
        self._sockets.wake()

    def status(self) -> SourceStatus:
        state, reason = self._liveness.state(time.monotonic_ns())
        if self._failure:
            state, reason = SourceState.ENDED, self._failure
        return SourceStatus(
            state=state,
            reason=reason,
            frames_received=self._frames_received,
            frames_dropped=self._sync.num_dropped + self.pending.num_frames_discarded,
            resyncs=self._sync.num_resyncs,
            messages_rejected=self._messages_rejected + self._sockets.num_cut,
            num_skipped=self._unknowns.num_skipped,
            num_unknown=self._unknowns.values,
            latency_ns=self._latency_ns,
            last_message_ns=self._liveness.last_message_ns,
            role=self._role,
            intervenes=self._intervenes,
            adapters=self._adapters,
            takes_adapters=self._takes_adapters,
        )

    @property
    def position(self) -> tuple[int | None, int]:
        """Epoch and sequence number of the last frame that was passed on to the consumer."""
        return self._sync.epoch, self._sync.seq

    # Methods of the reading thread.

    def run(self) -> None:
        """Read until `stop` is called, then close the sockets."""
        try:
            while not self._closing:
                self._run_pass()
        except Exception as error:  # reported in the status: otherwise, a failed source looks like an idle engine
            self._failure = f"reading failed: {error!r:.200}"
            raise
        finally:
            self.finish()

    def finish(self) -> None:
        """Send all queued commands, abort awaited requests, and close the sockets."""
        self._send_waiting()
        self._abort_awaited()
        self._sockets.close()

    def poll(self, wait_ms: int = 0) -> tuple[int, int]:
        """Receive and process messages for up to `wait_ms`, and send requests that are due. Returns the numbers
        of messages and replies.
        """
        self._sockets.wait(wait_ms, replies=self.replies.num_free_slots > 0)
        now_ns = self._polled_ns = time.monotonic_ns()
        self.feed.begin_pass()
        messages = self._sockets.receive_telemetry(MAX_MESSAGES_A_PASS)
        # All that fit in the queue: replies that are unread when a connection ends are lost at its next poll.
        num_replies = self._read_replies(now_ns)
        for data in messages:
            self._read_telemetry(data, now_ns)
        self._tick(now_ns)
        self._pass_on_updates(sum(map(len, messages)))
        return len(messages), num_replies

    def _run_pass(self) -> None:
        num_messages, num_replies = self.poll(CALM_TICK_MS if self._is_calm else TICK_MS)
        if num_messages or num_replies:
            with self.changed:
                self.changed.notify_all()
            is_first, self._received_ns = self._polled_ns - self._received_ns > NAP_AFTER_NS, self._polled_ns
            if num_messages < MAX_MESSAGES_A_PASS and not is_first:
                time.sleep(self._nap_s)

    @property
    def _is_calm(self) -> bool:
        """Whether nothing is outstanding: no snapshot request is open, no command is queued, and this client's
        session was announced to the engine.
        """
        return self._sync.is_idle and self.outgoing.is_empty and self._num_introduced > 0

    def _read_replies(self, now_ns: int) -> int:
        num_read = 0
        while replies := self._sockets.receive_replies(self.replies.num_free_slots):
            num_read += len(replies)
            for data in replies:
                self._read_reply(data, now_ns)
            if sum(map(len, replies)) >= MAX_READ_BYTES:
                break  # give telemetry a turn
        return num_read

    def _read_telemetry(self, data: bytes, now_ns: int) -> None:
        try:
            message = decode_telemetry(data, self._unknowns)
        except UnknownMessage:
            self._liveness.record_message(now_ns)
            return
        except ProtocolError as error:
            self._reject(error, data)
            return
        if not isinstance(message, Hello | Snapshot | Goodbye | Progress) and not self._sync.accepts_time(
            message.epoch, message.time_ns, now_ns
        ):
            kind = type(message).__name__
            self._reject(ProtocolError(f"{kind}: its time is more than a day from where the engine's clock was"), data)
            self._sync.lose()
            return
        self._liveness.record_message(now_ns)
        if isinstance(message, Frame):
            self._frames_received += 1
            self._measure_latency(message)
            self._sync.frame(message, now_ns, data)
        elif self._process_other(message, now_ns):
            self.feed.add_other(message, data)

    def _process_other(self, message: TelemetryMessage, now_ns: int) -> bool:
        """Process a message other than a frame.

        Returns whether to record the message: it must be from the current engine, or progress of an engine that is
        starting.
        """
        if isinstance(message, Heartbeat):
            self._process_heartbeat(message, now_ns)
        elif isinstance(message, DeviceSample):
            self._extras.samples.append(message)
        elif isinstance(message, Reading):
            self._extras.readings.append(message)
        elif isinstance(message, Devices):
            self._extras.devices.append(message)
        elif isinstance(message, MemoryBreakdown):
            self._extras.memory = message
        elif isinstance(message, Progress):
            self._liveness.progress(message)
            self._extras.progress = message
            return True
        elif isinstance(message, Goodbye):
            if message.epoch == self._sync.epoch or self._sync.epoch is None or self._liveness.has_ended:
                self._liveness.goodbye(message.reason)
        elif isinstance(message, Hello):
            if message.epoch != self._sync.epoch:
                self._sync.want_snapshot()
            return False  # the hello is part of its snapshot
        return not isinstance(message, Snapshot) and message.epoch == self._sync.epoch

    def _process_heartbeat(self, heartbeat: Heartbeat, now_ns: int) -> None:
        self._sync.heartbeat(heartbeat, now_ns)
        if heartbeat.epoch == self._sync.epoch:
            self._liveness.heartbeat(heartbeat, now_ns)
            self._extras.heartbeat = heartbeat

    def _read_reply(self, data: bytes, now_ns: int) -> None:
        try:
            reply = decode_reply(data, self._unknowns)
        except UnknownMessage:
            return
        except ProtocolError as error:
            self._reject(error, data)
            return
        if isinstance(reply, Snapshot):
            self._process_snapshot(reply, data, now_ns)
        elif isinstance(reply, Status) and reply.tag >= FIRST_TAG:
            self._liveness.record_status(reply)
            self._role, self._intervenes = reply.role, reply.intervenes
            self._adapters, self._takes_adapters = reply.adapters, reply.takes_adapters
            self._extras.progress = reply.progress or self._extras.progress
        elif isinstance(reply, Failed) and reply.tag >= FIRST_TAG:
            self._sync.refused(reply.tag)
        else:
            self._awaited.record_reply(reply)
            self.replies.put(reply, len(data))

    def _process_snapshot(self, snapshot: Snapshot, data: bytes, now_ns: int) -> None:
        is_awaited = self._sync.is_awaited(snapshot)
        if self._sync.snapshot(snapshot, now_ns, data):
            self._locate_engine(snapshot.hello)
            self._liveness.record_snapshot()
            self._liveness.record_message(now_ns)
        elif is_awaited:
            self.feed.snapshot(snapshot, data)

    def _locate_engine(self, hello: Hello) -> None:
        """Determine from `Hello.host` whether the engine is on this machine. The address is not sufficient,
        because it may be that of a tunnel.
        """
        self.is_same_machine = hello.host == host_id() if hello.host else self._sockets.is_ipc
        self._liveness.is_local = self.is_same_machine
        if not self.is_same_machine:
            self._latency_ns = -1  # measured before the host was known
        self.prompt_api_address = hello.api

    def _reject(self, error: ProtocolError, data: bytes) -> None:
        self._messages_rejected += 1
        self._liveness.rejection, self._liveness.rejected_ns = str(error), time.monotonic_ns()
        if tag_of(data) in _STATE_MESSAGES:
            self._sync.unreadable()

    def _measure_latency(self, frame: Frame) -> None:
        latency_ns = time.monotonic_ns() - frame.time_ns
        is_plausible = self.is_same_machine and 0 <= latency_ns < MAX_LATENCY_NS
        self._latency_ns = latency_ns if is_plausible else -1

    def _tick(self, now_ns: int) -> None:
        if self._resync_wanted:
            self._resync_wanted = False
            self._sync.lose()
        self._sync.tick(now_ns)
        is_connected = self._sockets.is_connected
        if self._liveness.connection(is_connected):
            self._connected_ns, self._status_requested_ns = now_ns, 0
            if not is_connected:
                self._sync.disconnected()
        self._liveness.refusal, self._liveness.absence = self._sockets.refusal, self._sockets.absence
        self._report_cut_connections()
        if is_connected and self._introduce(now_ns):
            self._request_snapshot(now_ns)
            self._send_waiting()
        for refusal in self.outgoing.expired(now_ns):
            self.replies.put(refusal)

    def _report_cut_connections(self) -> None:
        if self._sockets.num_cut != self._num_cut_connections:
            self._num_cut_connections = self._sockets.num_cut
            self._liveness.rejection, self._liveness.rejected_ns = SENDS_TOO_MUCH, time.monotonic_ns()

    def _introduce(self, now_ns: int) -> bool:
        """Send this client's session id and its awaited requests to the engine as the first message of each
        connection. Returns whether that was done for the current connection.
        """
        num_connections = self._sockets.num_connections
        if num_connections == self._num_introduced:
            return True
        self._read_replies(now_ns)  # process the replies of the previous connection first
        hello = GetStatus(tag=FIRST_TAG, session=self._session, awaited=self._awaited.all())
        if not self._sockets.send(encode(hello)):
            return False
        self._num_introduced, self._status_requested_ns = num_connections, now_ns
        return True

    def _send_waiting(self) -> None:
        self.outgoing.send_all(self._sockets.send, self._awaited.sent)

    def _abort_awaited(self) -> None:
        """Abort this client's awaited requests, so that the engine does not wait for the client to reconnect."""
        for request_id in self._awaited.ids:
            if not self._sockets.send(encode(Abort(request_id=request_id))):
                return

    def _request_snapshot(self, now_ns: int) -> None:
        state, _ = self._liveness.state(now_ns)
        is_status_needed = state is not SourceState.LIVE or self._liveness.may_be_paused(now_ns)
        interval_ns = ASK_STATUS_NS if is_status_needed else ASK_ROLE_NS
        if now_ns - self._status_requested_ns >= interval_ns:
            self._sockets.send(encode(GetStatus(tag=FIRST_TAG)))
            self._status_requested_ns = now_ns
        if not self._sync.in_sync and now_ns - self._connected_ns >= QUIET_NS:
            self._sync.want_snapshot()
        if self._sync.in_sync and self.feed.wants_snapshot(now_ns):
            self._sync.want_snapshot()
        tag = self._sync.next_request(now_ns)
        if tag is not None and self._sockets.send(encode(GetSnapshot(tag=tag))):
            self._sync.sent(tag, now_ns)

    def _pass_on_updates(self, num_bytes: int) -> None:
        if self._taker is not None:
            self._taker(self._sync.drain_runs())
            self._extras = Extras()
            return
        for run in self._sync.drain_runs():
            blocks = None if run.snapshot is None else self._unpack(run.snapshot)
            self.pending.put(coalesce(run.frames, snapshot=run.snapshot, blocks=blocks), num_bytes)
            num_bytes = 0
        if not self._extras.is_empty:
            self.pending.put(self._extras.update(), num_bytes)
            self._extras = Extras()

    def _unpack(self, snapshot: Snapshot) -> WholeBlocks | None:
        """Return the unpacked blocks of `snapshot`. Returns None if they are invalid; the consumer then detects
        and reports the error.
        """
        try:
            blocks = WholeBlocks(snapshot)
        except ProtocolError:
            return None
        if blocks.num_rows != self._num_rows:  # otherwise, the mirror's ledger is overwritten in place
            self._num_rows = blocks.num_rows
            blocks.make_ledger()
        return blocks
