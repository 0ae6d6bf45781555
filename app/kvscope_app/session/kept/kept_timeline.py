"""What a live session keeps of itself: the ring on the disk, its overview, and a recording that runs beside it.

Owns both. Whoever is given everything that the source accepts is given it once (`Both`). Knows no Qt.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvscope_app.session.background import Background
from kvscope_app.session.kept.recorder import Recorder
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.recordings.read_budget import ProgressCallback
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.ring_client import RingClient
from kvscope_telemetry.recordings.save import save
from kvscope_telemetry.sources.sink import Sink
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import Summary
from kvscope_telemetry.texts.block_texts import RecordedText

_END_S: Final = 10.0
"""The longest that the end of a session waits for its recording to be whole."""


class Both:
    """A sink that gives to two. What either of them lost is lost: a snapshot makes it good for both."""

    def __init__(self, ring: Sink, recording: Sink) -> None:
        self._ring = ring
        self.recording: Sink | None = recording

    @property
    def failure(self) -> str:
        """Of both; while one goes on there is none."""
        recording = self.recording
        return self._ring.failure and (recording.failure if recording is not None else self._ring.failure)

    def write(self, message: TelemetryMessage, data: bytes | None = None) -> bool:
        """See `Sink`."""
        taken = [each.write(message, data) for each in (self._ring, self.recording) if each and not each.failure]
        return all(taken)


class KeptTimeline:
    """Begins with `ring`, which `set_sink` gives to the source; `close` ends both."""

    def __init__(self, ring: RingClient, set_sink: Callable[[Sink | None], None]) -> None:
        self.ring = ring
        self.recorder: Recorder | None = None
        """The recording that runs beside it."""
        self.has_texts = False
        """Whether texts of blocks were ever written to the ring."""
        self._set_sink = set_sink
        self._both: Both | None = None
        set_sink(ring)

    @property
    def failure(self) -> str:
        """Why nothing (more) is kept, or nothing for now; empty while all is well."""
        return self.ring.failure or self.ring.pause

    @property
    def range_ns(self) -> tuple[int, int] | None:
        """What is there to go to, by the wall clock; None before there is anything."""
        start_ns, end_ns = self.ring.start_ns, self.ring.end_ns
        return None if start_ns is None or end_ns is None else (start_ns, end_ns)

    def take_into(self, overview: SessionOverview) -> bool:
        """Add what was summarized since the last call; whether there was anything. What left the ring is forgotten."""
        fresh = self.ring.take_overview()
        if not fresh:
            return False
        summaries = [item for item in fresh if isinstance(item, Summary)]
        overview.extend(summaries, (item for item in fresh if not isinstance(item, Summary)))
        if self.ring.start_ns is not None:
            overview.forget_before(self.ring.start_ns)
        return True

    def mark(self, bookmarks: list[Bookmark]) -> str:
        """Keep what was said of bookmarks, in a recording that runs as well; why that cannot be, else empty."""
        taken = [self.ring.mark(bookmark) for bookmark in bookmarks]
        if self.recorder is not None:
            for bookmark in bookmarks:
                self.recorder.writer.mark(bookmark)
        return "" if all(taken) else f"bookmarks last as long as this window: {self.failure or 'nothing is kept'}"

    def write_texts(self, texts: list[RecordedText]) -> None:
        """What blocks hold, where a person agreed: into the ring and the recording that runs."""
        self.has_texts = self.has_texts or bool(texts)
        self.ring.write_texts(texts)
        recorder = self.recorder
        if recorder is not None:
            recorder.writer.write_texts(texts)

    def save(self, path: Path, seconds: float) -> Background[str]:
        """Write the last `seconds` of the ring to `path`; made is what is wrong with the ring, in a few words, mostly
        nothing."""

        def work(watch: ProgressCallback) -> str:
            recording = self.open_recording(watch)
            save(recording, path, recording.info.duration_s - seconds, watch=watch)
            return recording.note

        return Background(work, "kvscope-save")

    def start_recording(self, path: Path) -> None:
        """Record to `path` from now on. Raises BadInput for one that will not do."""
        self.recorder = Recorder(path)
        self._both = Both(self.ring, self.recorder.writer)
        self._set_sink(self._both)

    def stop_recording(self) -> Background[Path] | None:
        """No more; the file is ended by a thread. The ring goes on without a hole."""
        recorder, self.recorder = self.recorder, None
        if self._both is not None:
            self._both.recording = None
        if recorder is None:
            return None

        def end(_: ProgressCallback) -> Path:
            recorder.writer.close()
            return recorder.path

        return Background(end, "kvscope-end")

    def close(self) -> None:
        """End a recording that still runs, whole, and delete the ring."""
        self._set_sink(None)
        ending = self.stop_recording()
        if ending is not None:
            ending.wait(_END_S)
        self.ring.close()

    def open_recording(self, watch: ProgressCallback) -> Recording:
        """Open what the ring has now, on the thread that reads it; it grows."""
        self.ring.flush()
        return Recording.open(self.ring.folder, watch, origin_ns=self.ring.origin_ns)
