"""What can be read of a recording into a new, whole one: never in place.

Owns which messages go on: what cannot be read is left out, and after it everything up to the next snapshot, so that the
new file has no state that never was. Keyframes, delta checkpoints and summaries are made anew by the writer.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.telemetry import Frame, Snapshot
from kvscope_telemetry.recordings.layout import PART_SUFFIX
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.state.continuity import Continuity

_LOOK_EVERY = 256


@dataclass(frozen=True, slots=True)
class Recovered:
    """What became of it."""

    num_frames: int
    num_left_out: int
    """Frames that follow no state that could be read."""
    length_s: float


def recover(recording: Recording, path: Path, watch: ProgressCallback | None = None) -> Recovered:
    """Write what can be read of `recording` to `path`. Raises BadInput for a path that will not do, KvscopeError for a
    disk that is full, OpeningCancelled when `watch` says so; then nothing is left of it."""
    writer = RecordingWriter(path)
    try:
        recovered = _copy(recording, writer, watch)
        writer.close()
    except BaseException:
        _give_up(writer)
        raise
    return recovered


def _copy(recording: Recording, writer: RecordingWriter, watch: ProgressCallback | None) -> Recovered:
    sequence = Continuity()
    num_frames = num_left_out = 0
    length_s = max(recording.info.duration_s, 1e-9)
    for count, (at_s, message) in enumerate(recording.messages(keyframes=True)):
        if watch is not None and count % _LOOK_EVERY == 0 and not watch(min(1.0, at_s / length_s)):
            raise OpeningCancelled
        if isinstance(message, Frame | Snapshot):
            goes_on = sequence.takes(message)
            if isinstance(message, Frame):
                num_frames, num_left_out = num_frames + goes_on, num_left_out + (not goes_on)
            if not goes_on:
                continue
        if not writer.write(message, wait=True, log_time_ns=recording.start_ns + round(at_s * 1e9)):
            raise KvscopeError(f"recording {str(writer.path)!r} cannot be written: {writer.failure}")
    for bookmark in recording.bookmarks():
        writer.mark(bookmark)
    texts = recording.texts()
    while together := list(islice(texts, _LOOK_EVERY)):
        writer.write_texts(together, wait=True)
    if not num_frames and sequence.epoch is None:
        raise KvscopeError(f"nothing could be recovered: {str(recording.path)!r} contains no readable state")
    return Recovered(num_frames, num_left_out, recording.info.duration_s)


def _give_up(writer: RecordingWriter) -> None:
    with contextlib.suppress(KvscopeError):
        writer.close()
    writer.path.unlink(missing_ok=True)
    writer.path.with_name(writer.path.name + PART_SUFFIX).unlink(missing_ok=True)
