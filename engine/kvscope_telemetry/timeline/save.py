"""A part of what was recorded into a file of its own, after the state it begins with; bookmarks of its time go along.

Its chunks are taken as they lie (`saving`); where that cannot be, for damage or for what another tool wrote, the
messages are told anew, without what is damaged, and what a recording has besides (keyframes, leaps, summaries) is made
again. Either way it is whole in itself.

Owns what becomes of the file when that ends early. Knows neither rings nor who asks.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from kvscope_telemetry.errors import KvscopeError, ProtocolError, UnknownMessage
from kvscope_telemetry.messages.wire import decode_telemetry
from kvscope_telemetry.recorded import Recorded
from kvscope_telemetry.recordings.effort import Watch
from kvscope_telemetry.recordings.keyframes import snapshot_of
from kvscope_telemetry.recordings.layout import KEYFRAMES
from kvscope_telemetry.recordings.mcap_file import McapFile
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.timeline.saving.besides import bookmarks_of, texts_of
from kvscope_telemetry.timeline.saving.chunk_copy import ChunkCopy
from kvscope_telemetry.timeline.saving.pieces import NotAsWritten

_LOOK_EVERY: Final = 256
_MAX_QUEUED_BYTES: Final = 4 << 20
"""Reading is quicker than writing: more of it would only wait, in several times these bytes of memory."""


def save(
    recorded: Recorded, path: Path | str, from_s: float, until_s: float | None = None, *, watch: Watch | None = None
) -> bool:
    """Write what was recorded from `from_s` until `until_s` (both included) to `path`, which ends in `.mcap`.

    It is called `path.part` until it is whole. False: `watch` ended it, and nothing is left of it; nor is anything when
    it fails. Raises BadInput for a path that will not do, KvscopeError for a disk that is full.
    """
    until_s = recorded.info.duration_s if until_s is None else until_s
    try:
        return _take(recorded, Path(path), from_s, until_s, watch or _always)
    except NotAsWritten:
        recorded.grow()  # what went meanwhile is not looked for again
        return _tell(recorded, path, from_s, until_s, watch)


def _take(recorded: Recorded, path: Path, from_s: float, until_s: float, watch: Watch) -> bool:
    """Chunks as they lie. Raises NotAsWritten, and nothing is left."""
    from_ns, until_ns = _range_ns(recorded, from_s, until_s)
    file, is_whole = McapFile(path, is_copy=True), False
    try:
        is_whole = ChunkCopy(recorded, from_ns, until_ns, watch).write(file)
        if is_whole:
            file.finish()
    except OSError as error:
        is_whole = False
        raise KvscopeError(f"recording {str(path)!r} cannot be written: {error.strerror or error}") from None
    finally:
        if not is_whole:
            file.end_early()
            for left in (file.part, file.path):
                left.unlink(missing_ok=True)
    return is_whole


def _tell(recorded: Recorded, path: Path | str, from_s: float, until_s: float, watch: Watch | None) -> bool:
    """Message by message."""
    writer = RecordingWriter(path, max_queued_bytes=_MAX_QUEUED_BYTES)
    is_whole = False
    try:
        is_whole = _copy(recorded, writer, from_s, until_s, watch)
        writer.close()
    except KvscopeError:
        is_whole = False
        if not writer.failure:
            raise
        raise KvscopeError(f"recording {str(path)!r} cannot be written: {writer.failure}") from None
    finally:
        if not is_whole:
            with contextlib.suppress(KvscopeError):
                writer.close()
            for left in (writer.part, writer.path):
                left.unlink(missing_ok=True)
    return is_whole


def _range_ns(recorded: Recorded, from_s: float, until_s: float) -> tuple[int, int]:
    """By the wall clock."""
    from_s = max(from_s, recorded.first_s)
    return recorded.start_ns + round(from_s * 1e9), recorded.start_ns + round(until_s * 1e9)


def _copy(recorded: Recorded, writer: RecordingWriter, from_s: float, until_s: float, watch: Watch | None) -> bool:
    from_s = max(from_s, recorded.first_s)
    begin_ns, until_ns = _range_ns(recorded, from_s, until_s)
    from_ns = begin_ns
    if _write_state(recorded, writer, from_s, from_ns):
        from_ns += 1  # the state has all until then
    for count, stored in enumerate(recorded.raw_messages(from_ns, until_ns)):
        if count % _LOOK_EVERY == 0 and not _goes_on(watch, stored.log_time_ns - from_ns, until_ns - from_ns):
            return False
        if stored.kind == KEYFRAMES:  # made anew
            continue
        with contextlib.suppress(UnknownMessage, ProtocolError):  # what cannot be read was left out before
            message = decode_telemetry(stored.data)
            if not writer.write(message, stored.data, wait=True, log_time_ns=stored.log_time_ns):
                break
    for bookmark in bookmarks_of(recorded, begin_ns, until_ns):
        writer.mark(bookmark)
    for texts in texts_of(recorded, from_ns, until_ns):
        writer.write_texts(texts, wait=True)
    return _goes_on(watch, 1, 1)


def _write_state(recorded: Recorded, writer: RecordingWriter, from_s: float, from_ns: int) -> bool:
    """Begin with the state at `from_s`; whether there is one."""
    mirror = recorded.state_at(from_s)
    if mirror.hello is None:
        return False
    writer.write(mirror.hello, wait=True, log_time_ns=from_ns)
    memory = recorded.memory_before(from_s, mirror.hello.epoch)
    if memory is not None:
        writer.write(memory, wait=True, log_time_ns=from_ns)
    writer.write(snapshot_of(mirror), wait=True, log_time_ns=from_ns)
    return True


def _goes_on(watch: Watch | None, done: int, total: int) -> bool:
    return watch is None or watch(min(1.0, done / max(1, total)))


def _always(share: float) -> bool:
    return True
