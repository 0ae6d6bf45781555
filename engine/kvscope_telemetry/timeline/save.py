"""A part of what was recorded into a file of its own: the messages as they came, after the state it begins with.

What a recording has besides (keyframes, leaps, summaries) is made anew, so that it is whole in itself; bookmarks of
that time go with it, as they stand.

Owns what becomes of the file when that ends early. Knows neither rings nor who asks.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import msgspec

from kvscope_telemetry.errors import KvscopeError, ProtocolError, UnknownMessage
from kvscope_telemetry.messages.wire import decode_telemetry
from kvscope_telemetry.recorded import Recorded
from kvscope_telemetry.recordings.effort import Watch
from kvscope_telemetry.recordings.keyframes import snapshot_of
from kvscope_telemetry.recordings.layout import KEYFRAMES
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.summaries.bookmark import in_order, settled
from kvscope_telemetry.texts.block_texts import RecordedText

_LOOK_EVERY: Final = 256
_TEXTS_TOGETHER: Final = 256
_MAX_QUEUED_BYTES: Final = 4 << 20
"""Reading is quicker than writing: more of it would only wait, in several times these bytes of memory."""
_TEXTS_LATE_NS: Final = 5_000_000_000
"""A text is written so long after its block was so at most."""


def save(
    recorded: Recorded, path: Path | str, from_s: float, until_s: float | None = None, *, watch: Watch | None = None
) -> bool:
    """Write what was recorded from `from_s` until `until_s` (both included) to `path`, which ends in `.mcap`.

    It is called `path.part` until it is whole. False: `watch` ended it, and nothing is left of it; nor is anything when
    it fails. Raises BadInput for a path that will not do, KvscopeError for a disk that is full.
    """
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


def _copy(
    recorded: Recorded, writer: RecordingWriter, from_s: float, until_s: float | None, watch: Watch | None
) -> bool:
    from_s = max(from_s, recorded.first_s)
    until_s = recorded.info.duration_s if until_s is None else until_s
    start_ns = recorded.start_ns
    from_ns, until_ns = start_ns + round(from_s * 1e9), start_ns + round(until_s * 1e9)
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
    for bookmark in in_order(settled(recorded.bookmarks()).values()):
        if start_ns + round(from_s * 1e9) <= max(bookmark.time_ns, bookmark.until_ns) and bookmark.time_ns <= until_ns:
            writer.mark(bookmark)
    _copy_texts(recorded, writer, from_ns, until_ns)
    return _goes_on(watch, 1, 1)


def _copy_texts(recorded: Recorded, writer: RecordingWriter, from_ns: int, until_ns: int) -> None:
    """Those of this time, and of before it the newest of each block: it may still be held."""
    if not recorded.has_texts:
        return
    before: dict[int, RecordedText] = {}
    batch: list[RecordedText] = []
    for text in recorded.texts():
        if text.time_ns < from_ns:
            before[text.block] = msgspec.structs.replace(text, time_ns=from_ns)
        elif text.time_ns <= until_ns + _TEXTS_LATE_NS:
            batch.append(msgspec.structs.replace(text, time_ns=min(text.time_ns, until_ns)))
    for texts in (list(before.values()), batch):
        for start in range(0, len(texts), _TEXTS_TOGETHER):
            writer.write_texts(texts[start : start + _TEXTS_TOGETHER], wait=True)


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
