"""Publishes the telemetry of a host engine, given as a `CacheState`, and answers clients' queries on its sockets.

    publisher = Publisher("ipc:///tmp/mine", state)
    with publisher.updating():         # after each step
        ...                             # change `state`
        publisher.publish(state.frame(step, time.monotonic_ns()))
    publisher.close()

Clients are answered on the sockets' thread, and never while the state changes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol, Self

from msgspec.structs import replace

from kvscope_telemetry.credentials.key_ring import KeyRing
from kvscope_telemetry.devices.device_watch import DeviceWatch
from kvscope_telemetry.messages.commands import (
    Abort,
    BlockContent,
    BlockText,
    Command,
    Control,
    Evict,
    GetBlockText,
    GetSnapshot,
    GetStatus,
    Preempt,
    Reply,
    Status,
    refuse,
)
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.messages.telemetry import Goodbye, Heartbeat, MemoryBreakdown, TelemetryMessage
from kvscope_telemetry.producer.cache_state import CacheState
from kvscope_telemetry.recordings.engine_recorder import EngineRecorder
from kvscope_telemetry.transport.server_sockets import ServerSockets

Answer = Callable[[Reply], None]
"""Callback that receives the reply to a command. Called once, on any thread."""
DOES_NOT_SERVE: Final = "this engine accepts requests only through its own API"
CANNOT: Final = "this engine cannot do that"
ACTIONS: Final = (Abort, Control, Preempt, Evict)


class OperatorActions(Protocol):
    """Executes operators' commands in the host engine."""

    @property
    def paused_by(self) -> str:
        """Name of the user who paused the engine; empty if the engine is not paused."""

    def record_activity(self, client: bytes) -> None:
        """Renew the lease of the pause if `client` has paused the engine. Called for each message from a client."""

    def submit(self, client: bytes, command: Abort | Control | Preempt | Evict, by: str, answer: Answer) -> None:
        """Queue a command for the engine. Must not block. Like `record_activity`, it is called on the sockets'
        thread.
        """


class Publisher:
    """Publishes the state of a host engine from construction to `close`; also a context manager.

    Args:
        keyless: Role of clients without a key.
        record: File in which everything published is recorded.
        actions: Executes operators' commands; they are refused if None.
        contents: Returns the contents of blocks.
        texts: Returns the text of lists of token ids. May be slow.
        memory: Returns the memory use of the process `memory_pid`.
        on_problem: Called with one line about problems of the recording.

    Raises:
        BadInput: for an endpoint or a recording file that cannot be used.
        EndpointInUse: if another process serves the endpoint.
    """

    def __init__(
        self,
        endpoint: str,
        state: CacheState,
        *,
        keys: KeyRing | None = None,
        keyless: Role = Role.VIEWER,
        record: Path | None = None,
        actions: OperatorActions | None = None,
        contents: Callable[[Sequence[int]], Sequence[BlockContent]] | None = None,
        texts: Callable[[Sequence[Sequence[int]]], Sequence[str]] | None = None,
        memory: Callable[[], MemoryBreakdown | None] = lambda: None,
        memory_pid: Callable[[], int] = os.getpid,
        on_problem: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.state = state
        self.step_started_ns = 0
        """Monotonic time at which the current step began; 0 between steps."""
        self._actions, self._contents, self._texts = actions, contents, texts
        self._text_executor = ThreadPoolExecutor(1, "kvscope-texts")
        self._lock = threading.Lock()
        self._recorder = EngineRecorder(record, on_problem) if record is not None else None
        self._ready = threading.Event()
        self._closed = False
        self._sockets = ServerSockets(
            endpoint,
            on_command=self._receive,
            heartbeat=self._heartbeat,
            keys=keys,
            keyless=keyless,
            on_published=self._recorder.record if self._recorder is not None else None,
        )
        self._update_recorder()
        self._ready.set()
        self._sockets.publish(state.hello)
        self._devices = DeviceWatch(state.hello, memory, self._sockets.publish, pid=memory_pid)

    @property
    def telemetry_endpoint(self) -> str:
        return self._sockets.telemetry_endpoint

    @property
    def messages_dropped(self) -> int:
        """Number of telemetry messages dropped because they could not be sent in time."""
        return self._sockets.messages_dropped

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Context in which the state is locked: the caller may change it and publish frames of it, and no
        client's query reads it.
        """
        with self._lock:
            yield

    def publish(self, message: TelemetryMessage) -> None:
        """Send a message to all subscribers. Does not block."""
        self._sockets.publish(message)

    def close(self, reason: str = "") -> None:
        """Publish a goodbye message, with a one-line `reason` after an error, and close the sockets. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._devices.close()
        self._text_executor.shutdown(wait=False, cancel_futures=True)
        self._sockets.publish(Goodbye(epoch=self.state.hello.epoch, reason=reason))
        self._sockets.close()
        if self._recorder is not None:
            self._recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Called on the sockets' thread.

    def _receive(self, client: bytes, command: Command) -> None:
        self._ready.wait()
        if self._actions is not None:
            self._actions.record_activity(client)
        caller = self._sockets.caller(client)
        by = caller.name if caller is not None else "a client"
        if isinstance(command, GetSnapshot):
            with self._lock:
                snapshot = self.state.snapshot(command.tag)
            self._sockets.reply(client, snapshot)
        elif isinstance(command, GetStatus):
            self._sockets.reply(client, self._status(command.tag, by, caller.role if caller is not None else ""))
        elif isinstance(command, GetBlockText):
            with self._lock:
                contents = [] if self._contents is None else list(self._contents(command.blocks))
            self._text_executor.submit(self._reply_texts, client, command.tag, contents)
        elif isinstance(command, ACTIONS) and self._actions is not None:
            self._actions.submit(client, command, by, lambda reply: self._sockets.reply(client, reply))
        else:
            self._sockets.reply(client, refuse(command, CANNOT if self._actions else DOES_NOT_SERVE))

    def _reply_texts(self, client: bytes, tag: int, contents: list[BlockContent]) -> None:
        if self._texts is not None:
            texts = self._texts([content.token_ids for content in contents])
            contents = [replace(content, text=text) for content, text in zip(contents, texts, strict=True)]
        self._sockets.reply(client, BlockText(contents=tuple(contents), tag=tag))

    def _status(self, tag: int, name: str, role: str) -> Status:
        paused_by = self._actions.paused_by if self._actions is not None else ""
        return Status(
            phase="ready",
            telemetry_endpoint=self.telemetry_endpoint,
            hello=self.state.hello,
            tag=tag,
            role=role,
            name=name,
            intervenes=self._actions is not None,
            paused=bool(paused_by),
            paused_by=paused_by,
        )

    def _heartbeat(self) -> Heartbeat | None:
        if not self._ready.is_set():
            return None
        self._update_recorder()
        state, cache = self.state, self.state.hello.cache
        return Heartbeat(
            epoch=state.hello.epoch,
            time_ns=time.monotonic_ns(),
            seq=0,
            step=state.step,
            num_unfinished=len(state.requests),
            step_started_ns=self.step_started_ns,
            paused_by=self._actions.paused_by if self._actions is not None else "",
            max_num_seqs=cache.max_num_seqs,
            max_num_batched_tokens=cache.max_num_batched_tokens,
        )

    def _update_recorder(self) -> None:
        """Pass a snapshot to the recorder if it needs one: at the start and after a gap."""
        if self._recorder is not None and self._recorder.wants_snapshot:
            with self._lock:
                self._recorder.add_snapshot(self.state.snapshot())
