"""Thread that translates the notes of an engine's hooks to frames and publishes them.

Owns the hooks, the thread, and their end: by `close`, or by the first exception in kvscope's code, which removes all
hooks, is logged in the engine's log and is the reason of the goodbye. The engine continues. The thread polls for notes
every few milliseconds, so that the engine never has to wake it.

See docs/internals/decisions/0025-hooks-record-and-a-thread-translates.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from kvscope_inside.hooks import Hooks
from kvscope_inside.publisher import Publisher
from kvscope_telemetry.messages.telemetry import Event, Frame

NAP_S: Final = 0.004
"""Seconds between two polls for notes."""
MAX_NOTES: Final = 10_000
"""Maximum number of unpublished notes. More mean that publishing has stalled, so recording ends as well."""


class StepNotes(Protocol):
    """Notes that the hooks of a host engine recorded in its steps, oldest first."""

    notes: deque[Any]
    step_started_ns: int


class Teller:
    """Owns an engine's hooks, and a publishing thread from `start` to `close`.

    Args:
        engine: Name of the engine in messages.
        log: The engine's logger.
        on_failure: Called once after the hooks were removed, to end everything; default: log the error and close.
    """

    def __init__(
        self, engine: str, log: logging.Logger, on_failure: Callable[[str, Exception], None] | None = None
    ) -> None:
        self.hooks = Hooks(on_failure or self._fail)
        self._engine, self._log = engine, log
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._ends: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """Install hooks inside. If that raises, all are removed, because nothing would publish their notes."""
        try:
            yield
        except BaseException:
            self.hooks.remove()
            raise

    def start(
        self,
        publisher: Publisher,
        address: str,
        notes: StepNotes,
        apply: Callable[[Any], Frame],
        *,
        can_tell: Callable[[Any], bool] = lambda note: True,
        look: Callable[[], None] = lambda: None,
        ends: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Start publishing.

        Args:
            publisher: Publishes the frames.
            address: Address to log, for `kvscope --attach`.
            notes: Notes recorded by the hooks.
            apply: Converts a note to a frame.
            can_tell: Whether a note can be published yet. Later notes wait for it.
            look: Called after each poll.
            ends: Called after the goodbye.
        """
        if self.hooks.missing:
            missing = ", ".join(self.hooks.missing)
            line = f"this version of {self._engine} does not have {missing}: what they tell is unknown"
            publisher.state.add_event(Event(kind="note", time_ns=time.monotonic_ns(), cause=line))
            self._log.warning("kvscope: %s", line)
        self._publisher, self._notes, self._apply = publisher, notes, apply
        self._can_tell, self._look, self._ends = can_tell, look, list(ends)
        if self._closing.is_set():  # a hook raised already
            publisher.close("kvscope stopped watching")
            return
        self._thread = threading.Thread(target=self._run, name="kvscope-inside", daemon=True)
        self._thread.start()
        self._log.info("kvscope: this engine can be seen by kvscope --attach %s", address)

    def close(self, reason: str = "") -> None:
        """Remove the hooks, publish the remaining notes, then a goodbye. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.hooks.remove()
        if self._thread is None:
            return
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)
        self._publisher.close(reason)
        for end in self._ends:
            end()

    def _run(self) -> None:
        try:
            while not self._closing.wait(NAP_S):
                self._tell()
                self._look()
            self._tell()
        except Exception as error:
            self.hooks.fail("the thread that tells", error)

    def _tell(self) -> None:
        """Publish notes up to the first one that cannot be published yet."""
        notes, publisher = self._notes.notes, self._publisher
        publisher.step_started_ns = self._notes.step_started_ns
        if not notes:
            return
        if len(notes) > MAX_NOTES:
            raise RuntimeError(f"{len(notes)} steps wait to be told")
        with publisher.telling():
            while notes and self._can_tell(notes[0]):
                publisher.publish(self._apply(notes.popleft()))
            publisher.state.totals["messages_dropped"] = publisher.messages_dropped

    def _fail(self, name: str, error: Exception) -> None:
        end_after(error, name, self._log, self._engine, self.close)


def end_after(error: Exception, name: str, log: logging.Logger, who: str, close: Callable[[str], None]) -> None:
    """Log an error and call `close` with the reason on a new thread, because this thread may be the engine's.

    `who`: name of the engine, which continues.
    """

    def end() -> None:
        with contextlib.suppress(Exception):
            close(reason)

    reason = f"kvscope stopped watching: {type(error).__name__} in {name}: {error}"
    log.error("%s; %s goes on", reason, who, exc_info=bool(os.environ.get("KVSCOPE_DEBUG")))
    threading.Thread(target=end, name="kvscope-inside-end", daemon=True).start()
