"""Follows an engine over telemetry: one thread reads, one brings the mirror up to date; a scrape takes what is there.

Owns the source, the mirror and the tally, and the locks between those threads and whoever scrapes. The engine has one
subscriber more and nothing else to do. Knows no names of metrics.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvscope_engine.metrics.pool_figures import PoolFigures, pool_figures
from kvscope_engine.metrics.tally import Tally
from kvscope_telemetry.messages.telemetry import DeviceSample, Frame, MemoryBreakdown, Snapshot, TelemetryMessage
from kvscope_telemetry.source import SourceState, SourceStatus
from kvscope_telemetry.sources.live_source import LiveSource

TAKE_EVERY_S: Final = 0.5
"""How often the mirror takes what came, so that it never waits in heaps for a scrape."""
NAP_S: Final = 0.1
"""After each reading: nobody watches a scrape's tenth of a second, and many frames at a time cost the least."""
UP: Final = (SourceState.LIVE, SourceState.PAUSED, SourceState.STUCK)
"""The engine is there: what it told last is true now."""


class TallySink:
    """Takes everything that the source accepts, in order, and keeps the tally of the newest engine start."""

    failure = ""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held for as long as the tally changes, or is read."""
        self.tally: Tally | None = None

    def write(self, message: TelemetryMessage, data: bytes | None = None) -> bool:
        """The reading thread's."""
        with self.lock:
            if isinstance(message, Snapshot):
                self._take_snapshot(message)
            elif self.tally is None or getattr(message, "epoch", None) != self.tally.hello.epoch:
                pass  # of an engine that nobody knows the beginning of
            elif isinstance(message, Frame):
                self.tally.frame(message)
            elif isinstance(message, MemoryBreakdown):
                self.tally.memory = message
            elif isinstance(message, DeviceSample):
                self.tally.sample = message
        return True

    def _take_snapshot(self, snapshot: Snapshot) -> None:
        if self.tally is None or self.tally.hello.epoch != snapshot.hello.epoch:
            self.tally = Tally(snapshot, time.time())
        else:
            self.tally.snapshot(snapshot)


@dataclass(frozen=True, slots=True)
class Look:
    """What a scrape sees."""

    status: SourceStatus
    pool: PoolFigures | None
    """None while the engine is away, or has told nothing yet."""

    @property
    def is_up(self) -> bool:
        """Whether there is an engine that tells of itself."""
        return self.status.state in UP


class EngineWatch:
    """Of the engine at `endpoint`, over its restarts. Raises BadInput for an endpoint or key that is not accepted."""

    def __init__(self, endpoint: str, *, key: Path | None = None) -> None:
        self.sink = TallySink()
        self.began_s = time.time()
        self._mirror_lock = threading.Lock()
        self._closing = threading.Event()
        self._source = LiveSource(endpoint, key=key, sink=self.sink, nap_s=NAP_S)
        self._thread = threading.Thread(target=self._run, name="kvscope-metrics", daemon=True)
        self._thread.start()

    def look(self) -> Look:
        """As it is now. Any thread."""
        with self._mirror_lock:
            self._take()
            status, mirror = self._source.status, self._source.mirror
            is_known = status.state in UP and mirror.hello is not None
            return Look(status, pool_figures(mirror) if is_known else None)

    def close(self) -> None:
        """End both threads. Idempotent."""
        self._closing.set()
        self._thread.join()
        self._source.close()

    def _run(self) -> None:
        while not self._closing.wait(TAKE_EVERY_S):
            with self._mirror_lock:
                self._take()

    def _take(self) -> None:
        while self._source.update_mirror() is not None:
            pass
