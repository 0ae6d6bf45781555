"""A live engine as a `Source`: connect, receive updates, send commands.

Owns the lifetime of the reading thread (`live_reader`) and the interface for callers on other threads, and decides
where prompts are sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from kvscope_telemetry.errors import EngineDead
from kvscope_telemetry.messages.commands import (
    Abort,
    Command,
    EstimatePrompt,
    GetStatus,
    LoadedAdapter,
    Reply,
    Submit,
)
from kvscope_telemetry.mirror.coalesce import MAX_ENTRIES
from kvscope_telemetry.source import SourceStatus, Update
from kvscope_telemetry.sources.live_reader import NAP_S, LiveReader
from kvscope_telemetry.sources.mirrored_source import MirroredSource
from kvscope_telemetry.sources.sink import Sink
from kvscope_telemetry.transport.client_sockets import ClientSockets
from kvscope_telemetry.transport.connections import key_for


class PromptApi(Protocol):
    """API for prompts of an engine whose command socket accepts none. Thread-safe; never blocks."""

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...] | None:
        """LoRA adapters that prompts may use, from the API's latest status; None before the first status."""

    def send(self, command: Submit | EstimatePrompt | GetStatus, announced: str, *, is_same_machine: bool) -> None:
        """Send a prompt, a prompt to estimate, or a status request to the API that the engine's hello announced.

        Raises BadInput for a prompt that is too large.
        """

    def abort(self, abort: Abort) -> bool:
        """Abort a prompt. Returns False if it is not in progress at this API."""

    def poll_replies(self) -> list[Reply]:
        """Return and clear the replies since the last call, oldest first."""

    def close(self) -> None:
        """Abort all prompts. Takes at most a second."""


class LiveSource(MirroredSource):
    """The engine at `endpoint`, across its restarts. A context manager that closes the source at the end.

    The source waits for an engine that is not running yet.

    Args:
        key: File with the key that the engine's operator created for this client, or `NO_KEY` to use no key. If None,
            the key remembered for the endpoint is used; on loopback, the local key of this user otherwise
            (`connections.key_for`).
        sink: Receives all accepted messages (`set_sink`).
        nap_s: Sleep of the reading thread between passes in seconds. A longer sleep lowers the load and adds latency.
        max_entries: Maximum number of entries in updates that were not polled yet, as counted by `PendingUpdates`.
        make_prompt_api: Creates the client for prompts of an engine that accepts them at a separate API (`Hello.api`).

    Raises:
        BadInput: The endpoint or key is not accepted.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        key: Path | None = None,
        sink: Sink | None = None,
        nap_s: float = NAP_S,
        max_entries: int = MAX_ENTRIES,
        make_prompt_api: Callable[[], PromptApi] | None = None,
    ) -> None:
        self._name, self._make_prompt_api = endpoint, make_prompt_api
        self._reader = LiveReader(
            ClientSockets(endpoint, key=key_for(endpoint, key)), sink, nap_s, max_entries=max_entries
        )
        super().__init__(self._reader.changed)
        self._is_closed = False
        self._prompt_api_lock = threading.Lock()
        self._prompt_api: PromptApi | None = None
        self._thread = threading.Thread(target=self._reader.run, name="kvscope-reader", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._name

    @property
    def status(self) -> SourceStatus:
        """Current status. If the engine has a prompt API, `adapters` are those of the API, and None until the first
        prompt or status request is sent to it and it has answered.
        """
        status, prompt_api = self._reader.status(), self._prompt_api
        if not self._reader.prompt_api_address:
            return status
        return replace(status, adapters=None if prompt_api is None else prompt_api.adapters)

    @property
    def position(self) -> tuple[int | None, int]:
        """Epoch and sequence number of the newest frame that was processed. `poll_update` returns all changes
        up to this frame.
        """
        return self._reader.position

    def poll_update(self) -> Update | None:
        if self._reader.pending.pop_overflow():
            # The pending updates were discarded, because more were queued than fit. Later ones build on them, so that
            # only a new snapshot helps.
            self._reader.resync()
        return self._reader.pending.poll_update()

    def resync(self) -> None:
        self._reader.pending.discard()  # before resync: a snapshot that arrives in between must not be discarded
        self._reader.resync()

    def set_sink(self, sink: Sink | None) -> None:
        """Pass accepted messages to `sink` from the next pass on; None stops passing messages.

        Never waits: the previous sink may still receive a few messages. A snapshot is requested for the new sink;
        frames that arrive before it are passed to the sink after the snapshot.
        """
        self._reader.feed.set(sink)
        self._reader.wake()

    def send(self, command: Command) -> None:
        """Send a command. Thread-safe; never waits. Replies are returned by `poll_replies`.

        Prompts are sent to the engine's prompt API if it has one (`Hello.api`).

        Raises:
            BadInput: The command is too large.
            EngineDead: The source is closed, or too many commands are queued.
        """
        if self._is_closed:
            raise EngineDead(f"the connection to {self._name} is closed")
        if self._send_to_api(command):
            return
        self._reader.outgoing.put(command)
        self._reader.wake()

    def poll_replies(self) -> list[Reply]:
        """Return and clear the replies since the last call, oldest first. Replies to the source's own requests
        are not included.
        """
        replies = self._reader.replies.drain()
        return replies if self._prompt_api is None else replies + self._prompt_api.poll_replies()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._reader.stop()
        if self._prompt_api is not None:
            self._prompt_api.close()
        self._thread.join()

    def _send_to_api(self, command: Command) -> bool:
        """Send a prompt, the abort or estimate of one, or a status request to the prompt API.

        Returns whether the command is done. False means that it must also be sent to the engine, as a status request
        must.
        """
        if (
            isinstance(command, Submit | EstimatePrompt | GetStatus)
            and self._reader.prompt_api_address
            and self._make_prompt_api is not None
        ):
            with self._prompt_api_lock:
                self._prompt_api = self._prompt_api or self._make_prompt_api()
            self._prompt_api.send(
                command, self._reader.prompt_api_address, is_same_machine=self._reader.is_same_machine
            )
            return not isinstance(command, GetStatus)
        return isinstance(command, Abort) and self._prompt_api is not None and self._prompt_api.abort(command)
