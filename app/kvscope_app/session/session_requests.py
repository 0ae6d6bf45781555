"""All requests of a session: collected from live updates, or read from a recording on a separate thread.

Owns the `RequestLog`, the thread and its handle on the recording. Contains no widgets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from kvscope_app.session.background import Background
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.request_log import RequestLog, RequestLogReader
from kvscope_telemetry.source import Update

_GROW_INTERVAL_S: Final = 1.0


class LiveRequests:
    """Requests of a live source since the connection was made."""

    share = 1.0
    failure = ""

    def __init__(self) -> None:
        self.log = RequestLog()

    def add_update(self, update: Update, offset_ns: int) -> None:
        """Add an update of the source. `offset_ns` converts the engine's clock to the timeline's wall clock."""
        if update.snapshot is not None:
            self.log.restate(update.snapshot, offset_ns)
        if not (update.new_requests or update.requests or update.events):
            return
        times = update.series.get("time_ns")
        newest_ns = int(times[-1]) if times is not None else 0
        rows, first, reported_ns = [], 0, update.request_time_ns
        for each in update.requests:
            last = first + len(each.number) // 4
            rows.append((each, reported_ns[first:last] if reported_ns.size else np.full(last - first, newest_ns)))
            first = last
        self.log.add(update.new_requests, rows, update.events, newest_ns, offset_ns)

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


class RecordedRequests:
    """Requests of a recording. The thread starts in the constructor; `share` is the fraction read into `log`."""

    def __init__(self, open_recording: Callable[[ProgressCallback], Recording]) -> None:
        self.log = RequestLog()
        self._share = 0.0
        self._open_recording = open_recording
        self._is_ending = threading.Event()
        self._work: Background[None] = Background(self._read, "kvscope-requests")

    @property
    def share(self) -> float:
        """Fraction of the recording that has been read, 0 to 1."""
        return 1.0 if self._work.is_finished else self._share

    @property
    def failure(self) -> str:
        return self._work.failure

    def close(self) -> None:
        """Cancel reading and wait up to 2 s for the thread."""
        self._is_ending.set()
        self._work.cancel()
        self._work.wait(2.0)

    def _read(self, watch: ProgressCallback) -> None:
        recorded = self._open_recording(watch)
        read_until_ns = self._read_after(recorded, -1, watch)
        self._share = 1.0
        while recorded.may_grow and not self._is_ending.wait(_GROW_INTERVAL_S):
            try:
                has_grown = recorded.grow()
            except BadInput:  # the file is gone
                return
            if has_grown:
                read_until_ns = self._read_after(recorded, read_until_ns, watch)

    def _read_after(self, recorded: Recording, after_ns: int, watch: ProgressCallback) -> int:
        """Read the messages after `after_ns` (wall clock). Returns the time of the newest message read."""
        length_ns = max(recorded.end_ns - recorded.start_ns, 1)
        reader, newest_ns = RequestLogReader(self.log), after_ns
        for at_s, message in recorded.messages((after_ns + 1 - recorded.start_ns) / 1e9, keyframes=True):
            log_time_ns = recorded.start_ns + round(at_s * 1e9)
            newest_ns = max(newest_ns, log_time_ns)
            if reader.add_message(message, log_time_ns) and not watch(1.0):
                raise OpeningCancelled
            self._share = max(self._share, min((newest_ns - recorded.start_ns) / length_ns, 1.0))
        reader.flush()
        return newest_ns
