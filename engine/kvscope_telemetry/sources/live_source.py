"""A live engine as a `Source`: connect, watch, command.

Owns the life of the thread that reads (`live_reader`), what callers on other threads see, and where prompts go.
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
    GetStatus,
    LoadedAdapter,
    Reply,
    Submit,
)
from kvscope_telemetry.sockets.client_sockets import ClientSockets
from kvscope_telemetry.sockets.connections import key_for
from kvscope_telemetry.source import SourceStatus, Update
from kvscope_telemetry.sources.live_reader import NAP_S, LiveReader
from kvscope_telemetry.sources.mirrored_source import MirroredSource
from kvscope_telemetry.sources.sink import Sink
from kvscope_telemetry.state.coalesce import MAX_ENTRIES


class PromptApi(Protocol):
    """Where prompts go that an engine's command socket does not take. From any thread; never waits."""

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...] | None:
        """LoRA adapters that prompts may ask for, as it last said when it was asked how it is; None: it has not."""

    def ask(self, command: Submit | GetStatus, told: str, *, is_same_machine: bool) -> None:
        """A prompt, or how it is, of the API at `told`, as the engine's hello has it. Raises BadInput for a prompt that
        is too large."""

    def abort(self, abort: Abort) -> bool:
        """End a prompt; False where it is none of those on their way."""

    def take_replies(self) -> list[Reply]:
        """Answers since the last call, oldest first."""

    def close(self) -> None:
        """End all, within a second."""


class LiveSource(MirroredSource):
    """The engine at `endpoint`, over its restarts; a context manager that closes at the end.

    `key` is the key file that the engine's operator made for this client, `NO_KEY` for none; without it the one
    remembered for the endpoint is taken, or on loopback that of an engine of the same user (`connections`). An
    engine that is not there yet is waited for. `sink` is given all that is accepted (`set_sink`). The reading thread
    naps for `nap_s` between frames: longer costs less, and tells later. What waits for its taker is bounded by
    `max_entries`, as `Pending` counts them. `make_api` makes what sends prompts to an engine that
    takes them at its own API (`Hello.api`). Raises BadInput for an endpoint or key that is not accepted.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        key: Path | None = None,
        sink: Sink | None = None,
        nap_s: float = NAP_S,
        max_entries: int = MAX_ENTRIES,
        make_api: Callable[[], PromptApi] | None = None,
    ) -> None:
        self._name, self._make_api = endpoint, make_api
        self._reader = LiveReader(
            ClientSockets(endpoint, key=key_for(endpoint, key)), sink, nap_s, max_entries=max_entries
        )
        super().__init__(self._reader.changed)
        self._is_closed = False
        self._api_lock = threading.Lock()
        self._api: PromptApi | None = None
        self._thread = threading.Thread(target=self._reader.run, name="kvscope-reader", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """The endpoint."""
        return self._name

    @property
    def status(self) -> SourceStatus:
        """How it is now. Who takes prompts at an API of its own says there which adapters it has."""
        status, api = self._reader.status(), self._api
        return replace(status, adapters=None if api is None else api.adapters) if self._reader.api else status

    @property
    def position(self) -> tuple[int | None, int]:
        """Epoch and sequence number of the newest frame received whole; `take_update` gives everything up to it."""
        return self._reader.position

    def take_update(self) -> Update | None:
        """What came since the last call, None when nothing did."""
        if self._reader.pending.take_overflow():
            self._reader.resync()
        return self._reader.pending.take_update()

    def resync(self) -> None:
        """For a taker that could not apply an update: drop what waits, ask for a snapshot."""
        self._reader.pending.discard()  # first: a snapshot that comes in between is a good beginning
        self._reader.resync()

    def set_sink(self, sink: Sink | None) -> None:
        """From now on give what is accepted to `sink`, or to nobody. Never waits: the one before may get a little yet.

        A snapshot is asked for on its behalf; the frames that come meanwhile are given after that.
        """
        self._reader.feed.set(sink)
        self._reader.wake()

    def send(self, command: Command) -> None:
        """Send a command. From any thread; never waits; answers come from `take_replies`.

        A prompt goes to the engine's own API where it has one (`Hello.api`). Raises BadInput for one that is too large,
        EngineDead after `close` and when too many wait.
        """
        if self._is_closed:
            raise EngineDead(f"the connection to {self._name} is closed")
        if self._sends_to_api(command):
            return
        self._reader.outgoing.put(command)
        self._reader.wake()

    def take_replies(self) -> list[Reply]:
        """Answers since the last call, oldest first; those to our own questions are not among them."""
        replies = self._reader.replies.take_all()
        return replies if self._api is None else replies + self._api.take_replies()

    def close(self) -> None:
        """End the thread and free the sockets. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._reader.stop()
        if self._api is not None:
            self._api.close()
        self._thread.join()

    def _sends_to_api(self, command: Command) -> bool:
        """Whether it goes there, a prompt or the end of one that did; how it is, both are asked."""
        if isinstance(command, Submit | GetStatus) and self._reader.api and self._make_api is not None:
            with self._api_lock:
                self._api = self._api or self._make_api()
            self._api.ask(command, self._reader.api, is_same_machine=self._reader.is_same_machine)
            return isinstance(command, Submit)
        return isinstance(command, Abort) and self._api is not None and self._api.abort(command)
