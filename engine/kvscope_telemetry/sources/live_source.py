"""A live engine as a `Source`: connect, watch, command.

Owns the thread's life and what callers on other threads see. What the thread does is in `live_reader`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

from kvscope_telemetry.errors import EngineDead, ProtocolError
from kvscope_telemetry.keys.connections import key_for
from kvscope_telemetry.messages.commands import Command, Reply
from kvscope_telemetry.sockets.client_sockets import ClientSockets
from kvscope_telemetry.source import SourceStatus, Update
from kvscope_telemetry.sources.live_reader import NAP_S, LiveReader
from kvscope_telemetry.sources.sink import Sink
from kvscope_telemetry.state.mirror import Mirror

_LOOK_AGAIN_S: Final = 0.05


class LiveSource:
    """The engine at `endpoint`, over its restarts; a context manager that closes at the end.

    `key` is the key file that the engine's operator made for this client, `NO_KEY` for none; without it the one
    remembered for the endpoint is taken, or on loopback that of an engine of the same user (`connections`). An
    engine that is not there yet is waited for. `sink` is given all that is accepted (`set_sink`). The reading thread
    naps for `nap_s` between frames: longer costs less, and tells later. Raises BadInput for an endpoint or key that is
    not accepted.
    """

    def __init__(
        self, endpoint: str, *, key: Path | None = None, sink: Sink | None = None, nap_s: float = NAP_S
    ) -> None:
        self.mirror = Mirror()
        """The state as of the last `update_mirror()`."""
        self._name = endpoint
        self._reader = LiveReader(ClientSockets(endpoint, key=key_for(endpoint, key)), sink, nap_s)
        self._is_closed = False
        self._thread = threading.Thread(target=self._reader.run, name="kvscope-reader", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """The endpoint."""
        return self._name

    @property
    def status(self) -> SourceStatus:
        """How it is now."""
        return self._reader.status()

    @property
    def position(self) -> tuple[int | None, int]:
        """Epoch and sequence number of the newest frame received whole; `take` gives everything up to it."""
        return self._reader.position

    def take(self) -> Update | None:
        """What came since the last call, None when nothing did."""
        if self._reader.pending.take_overflow():
            self._reader.resync()
        return self._reader.pending.take()

    def update_mirror(self) -> Update | None:
        """Take what came and apply it to `mirror`; what was applied, None when nothing was.

        What does not fit is refused whole, and a snapshot makes it good: see `status.resyncs`.
        """
        update = self.take()
        if update is None:
            return None
        try:
            self.mirror.apply(update)
        except ProtocolError:
            self.resync()
            return None
        return update

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

        Raises BadInput for one that is too large, EngineDead after `close` and when too many wait.
        """
        if self._is_closed:
            raise EngineDead(f"the connection to {self._name} is closed")
        self._reader.outgoing.put(command)
        self._reader.wake()

    def take_replies(self) -> list[Reply]:
        """Answers since the last call, oldest first; those to our own questions are not among them."""
        return self._reader.replies.take_all()

    def wait(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `predicate()` holds, looking again whenever something came; whether it did in time."""
        deadline = time.monotonic() + timeout_s
        while not predicate():
            rest_s = deadline - time.monotonic()
            if rest_s <= 0:
                return False
            with self._reader.changed:
                self._reader.changed.wait(min(rest_s, _LOOK_AGAIN_S))
        return True

    def close(self) -> None:
        """End the thread and free the sockets. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._reader.stop()
        self._thread.join()

    def __enter__(self) -> LiveSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
