"""The thread between what an engine's hooks note and whoever watches it.

Owns the hooks, the thread, and their end: by `close`, or by the first exception of ours, which takes every hook away,
is one line in the engine's log and the reason of the goodbye. The engine goes on. The thread looks for notes every few
milliseconds, so that the engine wakes nobody; frames, and what is packed for them, are made there.

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
"""Between two looks for notes."""
MAX_NOTES: Final = 10_000
"""That wait to be told: more, and telling has stopped, so noting ends too."""


class StepNotes(Protocol):
    """What the hooks of a host engine recorded in its steps, oldest first."""

    notes: deque[Any]
    step_started_ns: int


class Teller:
    """Hooks at once, a thread from `start` to `close`. `engine` is what a person calls it, in `log`, which is its own.

    `on_failure` is called once, after the hooks are gone, by whoever ends it then; without it all ends by itself.
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
        """Inside, hooks are put. Where something raises there, all are gone: nobody would tell what they note."""
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
        """Tell notes from now on: `apply` makes a frame of each for which `can_tell`. `look` is called now and then;
        `ends` once all is over, after the goodbye."""
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
        """The engine is as it was; what was noted is told, then goodbye is said. Idempotent."""
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
        """All up to the first that cannot be told yet."""
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
    """It went wrong on this thread, which may be the engine's: `log` has why, and that `who` goes on; `close` is given
    that reason on a thread of its own."""

    def end() -> None:
        with contextlib.suppress(Exception):
            close(reason)

    reason = f"kvscope stopped watching: {type(error).__name__} in {name}: {error}"
    log.error("%s; %s goes on", reason, who, exc_info=bool(os.environ.get("KVSCOPE_DEBUG")))
    threading.Thread(target=end, name="kvscope-inside-end", daemon=True).start()
