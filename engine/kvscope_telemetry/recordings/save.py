"""Writes the undamaged messages of a recording, or of a part of it, to a new file. The recording itself is never
changed. `kvscope recover` uses this module.

Messages are recorded again without damaged ones. Keyframes, delta checkpoints and summaries are created again, so the
new file is complete in itself. A part starts with the state at that time, and includes the bookmarks and texts of its
time range. If saving fails, the new file is deleted. Must not depend on rings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from kvscope_telemetry.block_texts.block_texts import RecordedText
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.telemetry import Frame, Snapshot
from kvscope_telemetry.mirror.state_continuity import Continuity
from kvscope_telemetry.recordings.keyframes import snapshot_of
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback
from kvscope_telemetry.recordings.reader import FOREVER_NS, Recording
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.summaries.bookmark import Bookmark, in_order, newest_revisions

_PROGRESS_EVERY: Final = 256
_MAX_QUEUED_BYTES: Final = 4 << 20
"""Maximum size of the queue between reading and writing. Reading is faster than writing, so a longer queue
would need more memory without saving time.
"""
_TEXTS_TOGETHER: Final = 256
_TEXTS_LATE_NS: Final = 5_000_000_000
"""Maximum time by which the text of a block may be recorded later than the block was filled."""


@dataclass(frozen=True, slots=True)
class SaveResult:
    num_frames: int
    num_without_state: int
    """Number of saved frames without a readable preceding state. A player cannot seek to them."""
    length_s: float


def save(
    recorded: Recording,
    path: Path | str,
    from_s: float = 0.0,
    until_s: float | None = None,
    *,
    watch: ProgressCallback | None = None,
) -> SaveResult:
    """Write what was recorded from `from_s` to `until_s` (both inclusive) to `path`, which ends in `.mcap`.

    The file is named `path.part` until it is complete. It is deleted if saving fails.

    Raises:
        BadInput: `path` is not usable.
        KvscopeError: The disk is full, or no state can be read.
        OpeningCancelled: `watch`, which is called with the share done, returned False.
    """
    writer = RecordingWriter(path, max_queued_bytes=_MAX_QUEUED_BYTES)
    try:
        saved = _copy(recorded, writer, from_s, until_s, watch)
        writer.close()
    except BaseException as error:
        with contextlib.suppress(KvscopeError):
            writer.close()
        for leftover in (writer.part, writer.path):
            leftover.unlink(missing_ok=True)
        if not (writer.failure and isinstance(error, KvscopeError)):
            raise
        raise KvscopeError(f"recording {str(path)!r} cannot be written: {writer.failure}") from None
    return saved


def _copy(
    recorded: Recording, writer: RecordingWriter, from_s: float, until_s: float | None, watch: ProgressCallback | None
) -> SaveResult:
    begin_ns = recorded.start_ns + round(max(from_s, recorded.first_s) * 1e9)
    until_ns = FOREVER_NS if until_s is None else recorded.start_ns + round(until_s * 1e9)
    length_ns = max(1, min(until_ns, recorded.end_ns) - begin_ns)
    from_ns, continuity = 0, Continuity()
    if from_s > recorded.first_s:
        from_ns = begin_ns
        state = _write_state(recorded, writer, from_s, from_ns)
        if state is not None:
            continuity.accepts(state)
            from_ns += 1  # the state includes everything up to then
    num_frames = num_without_state = 0
    begin_s = max(from_ns - recorded.start_ns, 0) / 1e9
    for count, (at_s, message) in enumerate(recorded.messages(begin_s, until_s, keyframes=True)):
        log_time_ns = recorded.start_ns + round(at_s * 1e9)
        if count % _PROGRESS_EVERY == 0:
            _report_progress(watch, (log_time_ns - begin_ns) / length_ns)
        # Keyframes are created again. After damage, the next keyframe, or the state restored from delta checkpoints,
        # continues the recording.
        if isinstance(message, Frame | Snapshot):
            is_continuous = continuity.accepts(message)
            if isinstance(message, Frame):
                num_frames, num_without_state = num_frames + 1, num_without_state + (not is_continuous)
            elif not is_continuous:
                continue
        if not writer.write(message, wait=True, log_time_ns=log_time_ns):
            break
    for bookmark in _bookmarks_of(recorded, from_ns, until_ns):
        writer.add_bookmark(bookmark)
    texts = _texts_of(recorded, from_ns, until_ns)
    while batch := list(islice(texts, _TEXTS_TOGETHER)):
        writer.write_texts(batch, wait=True)
    if continuity.epoch is None:
        is_part = from_s > recorded.first_s or until_s is not None
        where = f" from {from_s:g} s to {'its end' if until_s is None else f'{until_s:g} s'}" if is_part else ""
        raise KvscopeError(f"nothing was saved: {str(recorded.path)!r} has no readable state{where}")
    _report_progress(watch, 1.0)
    return SaveResult(num_frames, num_without_state, length_ns / 1e9)


def _write_state(recorded: Recording, writer: RecordingWriter, from_s: float, from_ns: int) -> Snapshot | None:
    mirror = recorded.state_at(from_s)
    if mirror.hello is None:
        return None
    writer.write(mirror.hello, wait=True, log_time_ns=from_ns)
    memory = recorded.memory_before(from_s, mirror.hello.epoch)
    if memory is not None:
        writer.write(memory, wait=True, log_time_ns=from_ns)
    state = snapshot_of(mirror)
    writer.write(state, wait=True, log_time_ns=from_ns)
    return state


def _bookmarks_of(recorded: Recording, from_ns: int, until_ns: int) -> list[Bookmark]:
    bookmarks = in_order(newest_revisions(recorded.bookmarks()).values())
    return [each for each in bookmarks if from_ns <= max(each.time_ns, each.until_ns) and each.time_ns <= until_ns]


def _texts_of(recorded: Recording, from_ns: int, until_ns: int) -> Iterator[RecordedText]:
    """Yield the texts recorded in this time range, preceded by the newest earlier text of each block, because the block
    may still contain that text.

    Texts of requests from before the time range are left out.
    """
    older = (text for text in recorded.texts() if text.time_ns < from_ns and text.request is None) if from_ns else ()
    before = {text.block: text for text in older}
    for text in before.values():
        yield msgspec.structs.replace(text, time_ns=from_ns)
    for text in recorded.texts(from_ns):
        if from_ns <= text.time_ns <= until_ns + _TEXTS_LATE_NS:
            yield msgspec.structs.replace(text, time_ns=min(text.time_ns, until_ns))


def _report_progress(watch: ProgressCallback | None, share: float) -> None:
    if watch is not None and not watch(max(0.0, min(1.0, share))):
        raise OpeningCancelled
