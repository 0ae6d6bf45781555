"""Stored history of a live session: the ring on disk, its overview, and an optional recording written concurrently.

Owns the ring and the recording. The source has only one sink, so `TeeSink` forwards its data to the ring and the
recording. Imports no Qt.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvscope_app.session.background import Background
from kvscope_app.session.recording.recorder import Recorder
from kvscope_telemetry.block_texts.block_texts import RecordedText
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.recordings.read_budget import ProgressCallback
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.ring_client import RingClient
from kvscope_telemetry.recordings.save import save
from kvscope_telemetry.sources.sink import Sink
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import Summary

_FINISH_TIMEOUT_S: Final = 10.0
"""Maximum seconds that `DiskHistory.close` waits until a running recording is complete."""


class TeeSink:
    """Sink that forwards messages to a ring and a recording.

    If the ring or the recording loses a message, `write` returns False, and the snapshot that the source then requests
    repairs both files.
    """

    def __init__(self, ring: Sink, recording: Sink) -> None:
        self._ring = ring
        self.recording: Sink | None = recording

    @property
    def failure(self) -> str:
        """Error text once both the ring and the recording have failed, else empty."""
        recording = self.recording
        return self._ring.failure and (recording.failure if recording is not None else self._ring.failure)

    def write(self, message: TelemetryMessage, data: bytes | None = None) -> bool:
        accepted = [each.write(message, data) for each in (self._ring, self.recording) if each and not each.failure]
        return all(accepted)


class DiskHistory:
    """History in `ring`, which becomes the sink of the source through `set_sink`. `close` also ends a running
    recording.
    """

    def __init__(self, ring: RingClient, set_sink: Callable[[Sink | None], None]) -> None:
        self.ring = ring
        self.recorder: Recorder | None = None
        self.has_texts = False
        self._set_sink = set_sink
        self._tee: TeeSink | None = None
        set_sink(ring)

    @property
    def failure(self) -> str:
        """Reason why nothing is stored, permanently or at the moment; empty without an error."""
        return self.ring.failure or self.ring.pause

    @property
    def range_ns(self) -> tuple[int, int] | None:
        """Stored range on the wall clock; None while the ring is empty."""
        start_ns, end_ns = self.ring.start_ns, self.ring.end_ns
        return None if start_ns is None or end_ns is None else (start_ns, end_ns)

    def drain_into(self, overview: SessionOverview) -> bool:
        """Move new summaries and events to `overview`, and remove from it what has left the ring.

        Returns whether there were new summaries or events.
        """
        items = self.ring.drain_overview()
        if not items:
            return False
        summaries = [item for item in items if isinstance(item, Summary)]
        overview.extend(summaries, (item for item in items if not isinstance(item, Summary)))
        if self.ring.start_ns is not None:
            overview.forget_before(self.ring.start_ns)
        return True

    def store_bookmarks(self, bookmarks: list[Bookmark]) -> str:
        """Store bookmark revisions, also in a running recording. Returns the error text, empty on success."""
        accepted = [self.ring.add_bookmark(bookmark) for bookmark in bookmarks]
        if self.recorder is not None:
            for bookmark in bookmarks:
                self.recorder.writer.add_bookmark(bookmark)
        return (
            ""
            if all(accepted)
            else f"bookmarks are lost when this window closes: {self.failure or 'history is not recorded'}"
        )

    def write_texts(self, texts: list[RecordedText]) -> None:
        """Write block texts to the ring and to a running recording. Call it only if the user agreed to record texts."""
        self.has_texts = self.has_texts or bool(texts)
        self.ring.write_texts(texts)
        recorder = self.recorder
        if recorder is not None:
            recorder.writer.write_texts(texts)

    def save(self, path: Path, seconds: float) -> Background[str]:
        """Write the last `seconds` of the ring to `path` on a thread. The thread's result describes defects of
        the data, or is "".
        """

        def work(watch: ProgressCallback) -> str:
            recording = self.open_recording(watch)
            save(recording, path, recording.info.duration_s - seconds, watch=watch)
            return recording.damage_summary

        return Background(work, "kvscope-save")

    def start_recording(self, path: Path) -> None:
        """Start a recording. Raises BadInput if `path` cannot be written."""
        self.recorder = Recorder(path)
        self._tee = TeeSink(self.ring, self.recorder.writer)
        self._set_sink(self._tee)

    def stop_recording(self) -> Background[Path] | None:
        """Stop the recording, which a thread completes. Returns None if none was running.

        The ring continues without a gap.
        """
        recorder, self.recorder = self.recorder, None
        if self._tee is not None:
            self._tee.recording = None
        if recorder is None:
            return None

        def complete(_: ProgressCallback) -> Path:
            recorder.writer.close()
            return recorder.path

        return Background(complete, "kvscope-end")

    def close(self) -> None:
        """Complete a running recording and delete the ring."""
        self._set_sink(None)
        completion = self.stop_recording()
        if completion is not None:
            completion.wait(_FINISH_TIMEOUT_S)
        self.ring.close()

    def open_recording(self, watch: ProgressCallback) -> Recording:
        """Open the current contents of the ring as a recording that can grow. Runs on the calling thread."""
        self.ring.flush()
        return Recording.open(self.ring.folder, watch, origin_ns=self.ring.origin_ns)
