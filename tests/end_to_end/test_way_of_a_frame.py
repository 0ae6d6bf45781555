"""A frame passes a limited number of files into a recording and back by a seek: a real run is traced.

A file counts if one of its functions handles the frame or its representation: the columns of a batch, a delta
checkpoint or keyframe in the file, an update, or the state after it. The way in begins where a recorder receives
frames of some seconds (so that delta checkpoints are written too), the way back with a seek; it ends with a mirror of
that time. Opening the file and views do not count, nor do figures of each second and the checks of what is read.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from tests.simulated_engine.engine import SimulatedEngine
from tests.ways import Trace, check_way

from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter

WAY: Final = (
    "engine/kvscope_telemetry/messages/telemetry.py",
    "engine/kvscope_telemetry/recordings/writer.py",
    "engine/kvscope_telemetry/recordings/write_queue.py",
    "engine/kvscope_telemetry/recordings/mcap_file.py",
    "engine/kvscope_telemetry/recordings/frame_batch.py",
    "engine/kvscope_telemetry/recordings/columns.py",
    "engine/kvscope_telemetry/recordings/keyframes.py",
    "engine/kvscope_telemetry/mirror/follower.py",
    "engine/kvscope_telemetry/mirror/state_continuity.py",
    "engine/kvscope_telemetry/playback/playback_source.py",
    "engine/kvscope_telemetry/playback/playback_reader.py",
    "engine/kvscope_telemetry/recordings/reader.py",
    "engine/kvscope_telemetry/recordings/chunk_decoder.py",
    "engine/kvscope_telemetry/recordings/chunks.py",
    "engine/kvscope_telemetry/mirror/coalesce.py",
    "engine/kvscope_telemetry/source.py",
    "engine/kvscope_telemetry/mirror/mirror.py",
    "engine/kvscope_telemetry/mirror/whole_blocks.py",
    "engine/kvscope_telemetry/mirror/request_mirror.py",
    "engine/kvscope_telemetry/ledger.py",
)
BESIDE: Final = {
    "engine/kvscope_telemetry/messages/message_size.py": "what waits is bounded by its size",
    "engine/kvscope_telemetry/messages/unknown.py": "words of a later version",
    "engine/kvscope_telemetry/messages/validity.py": "what is read is checked",
    "engine/kvscope_telemetry/messages/wire.py": "asks for both checks",
    "engine/kvscope_telemetry/recordings/regular_file.py": "opens a file that somebody names, whatever is in it",
    "engine/kvscope_telemetry/running_time.py": "what an engine stood still for, in the figures of a second",
    "engine/kvscope_telemetry/mirror/pool_use.py": "used and wasted slots, in the figures of a second",
    "engine/kvscope_telemetry/summaries/": "figures of each second, and events",
}
STEP_NS: Final = 5_000_000


def test_telemetry_frame_is_recorded_and_replayed_through_the_listed_source_files_only(tmp_path: Path) -> None:
    now_ns = 1_000_000_000
    engine = SimulatedEngine(num_blocks=2_000, num_running=8, clock=lambda: now_ns)
    snapshot, frames = engine.snapshot(), list[Frame]()
    for _ in range(2_000):
        now_ns += STEP_NS
        frames.append(engine.advance())
    with Trace() as trace:
        with RecordingWriter(tmp_path / "recorded.mcap") as writer:
            writer.write(snapshot)
            assert writer.flush()
            trace.begin()
            for frame in frames:
                writer.write(frame, wait=True)
            assert writer.flush()
            trace.end()
        mirror = Mirror()
        with PlaybackSource(Recording.open(tmp_path / "recorded.mcap"), is_playing=False) as source:
            _wait(source)
            while source.poll_update() is not None:
                pass
            trace.begin()
            source.seek(7.3, with_past=False)
            _wait(source)
            while (update := source.poll_update()) is not None:
                mirror.apply(update)
            trace.end()
    assert 7.3 - STEP_NS / 1e9 < (mirror.time_ns - snapshot.time_ns) / 1e9 <= 7.3
    check_way(trace.ran, WAY, BESIDE)


def _wait(source: PlaybackSource) -> None:
    while source.is_seeking:
        time.sleep(0.01)
