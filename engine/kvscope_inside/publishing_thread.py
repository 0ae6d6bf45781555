"""Thread that translates the records of a host engine's hooks to frames and publishes them.

Owns the hooks and the thread. Both end with `close`, or with the first exception in kvscope's code, which removes all
hooks, is written to the engine's log and is the reason in the goodbye message. The engine continues. The thread polls
for records every few milliseconds, so that the engine never has to wake it.

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

POLL_INTERVAL_S: Final = 0.004
MAX_RECORDS: Final = 10_000
"""Maximum number of unpublished records. A higher number means that publishing has stalled, so watching ends."""


class HostRecorder(Protocol):
    """Source of records of a host engine's steps, made by hooks in that engine. Records are in order of time,
    oldest first.
    """

    records: deque[Any]
    step_started_ns: int


class PublishingThread:
    """Hooks of one engine, and a publishing thread that runs from `start` to `close`.

    Args:
        engine: Name of the engine in messages.
        log: The engine's logger.
        on_failure: Called once with the hook's name and the exception, after a hook failed and all hooks were removed.
            By default, the error is logged and this object is closed.
    """

    def __init__(
        self, engine: str, log: logging.Logger, on_failure: Callable[[str, Exception], None] | None = None
    ) -> None:
        self.hooks = Hooks(on_failure or self._fail)
        self._engine, self._log = engine, log
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._on_close: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def installing_hooks(self) -> Iterator[None]:
        """Context in which the caller installs hooks. If an exception is raised in it, all hooks are removed,
        because no thread would read what they record.
        """
        try:
            yield
        except BaseException:
            self.hooks.remove()
            raise

    def start(
        self,
        publisher: Publisher,
        address: str,
        recorder: HostRecorder,
        apply: Callable[[Any], Frame],
        *,
        can_publish: Callable[[Any], bool] = lambda record: True,
        after_poll: Callable[[], None] = lambda: None,
        on_close: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Start publishing.

        Args:
            publisher: Publishes the frames.
            address: Address to log, for `kvscope --attach`.
            recorder: Source of the hooks' records.
            apply: Converts a record to a frame.
            can_publish: Returns whether a record can be published yet. Later records wait for it.
            after_poll: Called after each poll.
            on_close: Called after the goodbye message was published.
        """
        if self.hooks.missing:
            missing = ", ".join(self.hooks.missing)
            line = f"this version of {self._engine} does not have {missing}: what they report is unknown"
            publisher.state.add_event(Event(kind="note", time_ns=time.monotonic_ns(), cause=line))
            self._log.warning("kvscope: %s", line)
        self._publisher, self._recorder, self._apply = publisher, recorder, apply
        self._can_publish, self._after_poll, self._on_close = can_publish, after_poll, list(on_close)
        if self._closing.is_set():  # a hook raised already
            publisher.close("kvscope stopped watching")
            return
        self._thread = threading.Thread(target=self._run, name="kvscope-inside", daemon=True)
        self._thread.start()
        self._log.info("kvscope: this engine can be seen by kvscope --attach %s", address)

    def close(self, reason: str = "") -> None:
        """Remove the hooks, publish the remaining records, then a goodbye message. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.hooks.remove()
        if self._thread is None:
            return
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)
        self._publisher.close(reason)
        for callback in self._on_close:
            callback()

    def _run(self) -> None:
        try:
            while not self._closing.wait(POLL_INTERVAL_S):
                self._publish_pending()
                self._after_poll()
            self._publish_pending()
        except Exception as error:
            self.hooks.fail("the publishing thread", error)

    def _publish_pending(self) -> None:
        records, publisher = self._recorder.records, self._publisher
        publisher.step_started_ns = self._recorder.step_started_ns
        if not records:
            return
        if len(records) > MAX_RECORDS:
            raise RuntimeError(f"{len(records)} steps wait to be published")
        with publisher.updating():
            while records and self._can_publish(records[0]):
                publisher.publish(self._apply(records.popleft()))
            publisher.state.totals["messages_dropped"] = publisher.messages_dropped

    def _fail(self, name: str, error: Exception) -> None:
        close_after_error(error, name, self._log, self._engine, self.close)


def close_after_error(
    error: Exception, name: str, log: logging.Logger, engine: str, close: Callable[[str], None]
) -> None:
    """Log an error, and call `close` with the reason. `close` is called on a new thread, because the calling thread may
    be the engine's.

    `engine`: name of the engine in the log line.
    """

    def run() -> None:
        with contextlib.suppress(Exception):
            close(reason)

    reason = f"kvscope stopped watching: {type(error).__name__} in {name}: {error}"
    log.error("%s; %s continues", reason, engine, exc_info=bool(os.environ.get("KVSCOPE_DEBUG")))
    threading.Thread(target=run, name="kvscope-inside-end", daemon=True).start()
