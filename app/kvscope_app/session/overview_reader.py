"""Reads the overview and the bookmarks of a recording on its own thread, or computes the overview if the file has none.

Owns the thread and a separate handle on the recording, so that no other reader waits for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Final

from kvscope_app.session.background import Background
from kvscope_app.session.recording.bookmark_file import bookmark_file, read_bookmarks, save_bookmarks
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.recordings.overview import OverviewPart, computed_parts, missing_from, written_parts
from kvscope_telemetry.recordings.read_budget import ProgressCallback
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import Summary

_GROW_INTERVAL_S: Final = 1.0
_POLL_INTERVAL_S: Final = 0.01
_MAX_DRAIN_S: Final = 0.06
"""Maximum seconds per call that the GUI thread spends on adding parts of the overview."""
_MAX_QUEUED_PARTS: Final = 8
"""Maximum number of parts of the overview that wait for the GUI thread, which bounds memory for a recording of several
days.
"""


class OverviewReader:
    """Reader of an overview on a thread, which starts in the constructor. Call `drain_into` until `is_finished`."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._parts: deque[OverviewPart] = deque()
        self._bookmarks: deque[Bookmark] = deque()
        self._bookmark_file = bookmark_file(recording)
        self._is_ending = threading.Event()
        self.is_computing = False
        """Whether the overview is being computed, which is slow, because the file has no summaries."""
        self._is_caught_up = False
        self._work: Background[None] = Background(self._read, "kvscope-overview")

    @property
    def share(self) -> float:
        """Fraction of the computation that is done, 0 to 1."""
        return self._work.share

    @property
    def failure(self) -> str:
        return self._work.failure

    @property
    def is_finished(self) -> bool:
        """Whether the thread has ended and all its results were fetched."""
        return self._work.is_finished and not self._parts and not self._bookmarks

    @property
    def is_caught_up(self) -> bool:
        """Whether the overview has all data that was in the file when the file was opened. A growing file may
        have more by now.
        """
        return (self._is_caught_up or self._work.is_finished) and not self._parts and not self._bookmarks

    def drain_into(self, overview: SessionOverview) -> bool:
        """Add the parts read so far to `overview`, for at most `_MAX_DRAIN_S`. Returns whether any were added."""
        until_s, is_new = time.monotonic() + _MAX_DRAIN_S, False
        while self._parts and time.monotonic() < until_s:
            self._parts.popleft().append_to(overview)
            is_new = True
        return is_new

    def pop_bookmarks(self) -> list[Bookmark]:
        """Return and remove the bookmark revisions read since the last call, from the recording and sidecar file."""
        return [self._bookmarks.popleft() for _ in range(len(self._bookmarks))]

    def save_bookmarks(self, revisions: list[Bookmark]) -> str:
        """Save bookmark revisions to the sidecar file; the recording is not rewritten. Returns the error text, empty on
        success.
        """
        return save_bookmarks(self._bookmark_file, revisions)

    def close(self) -> None:
        """Cancel reading and wait up to 2 s for the thread."""
        self._is_ending.set()
        self._work.cancel()
        self._work.wait(2.0)

    # On the reader thread

    def _read(self, watch: ProgressCallback) -> None:
        recording = self._recording.reopened()
        newest_ns, event_ns = None, 0
        for part in written_parts(recording):
            newest_ns = newest_ns if part.newest_ns is None else part.newest_ns
            event_ns = part.events[-1].time_ns if part.events else event_ns
            self._enqueue(part)
        self._read_bookmarks(recording)
        from_ns = missing_from(recording, newest_ns)
        if from_ns is not None and not recording.may_grow:
            self.is_computing = True
            try:
                for part in computed_parts(recording, from_ns, watch):
                    self._enqueue(part)
            finally:
                self.is_computing = False
        newest_ns = newest_ns or 0
        self._is_caught_up = True
        while recording.may_grow and not self._is_ending.wait(_GROW_INTERVAL_S):
            try:
                recording.grow()
            except BadInput:  # the file is gone
                return
            part = OverviewPart()
            for item in recording.overview_items(newest_ns):
                if isinstance(item, Summary) and item.time_ns > newest_ns:
                    newest_ns = item.time_ns
                    part.summaries.append(item)
                elif not isinstance(item, Summary) and item.time_ns > event_ns:
                    part.events.append(item)
            event_ns = max((event.time_ns for event in part.events), default=event_ns)
            self._bookmarks.extend(recording.bookmarks())
            if part.summaries or part.events:
                self._enqueue(part)

    def _read_bookmarks(self, recording: Recording) -> None:
        self._bookmarks.extend(recording.bookmarks())
        with contextlib.suppress(BadInput):  # reported when a bookmark is added
            self._bookmarks.extend(read_bookmarks(self._bookmark_file))

    def _enqueue(self, part: OverviewPart) -> None:
        while len(self._parts) >= _MAX_QUEUED_PARTS and not self._is_ending.wait(_POLL_INTERVAL_S):
            pass
        self._parts.append(part)
