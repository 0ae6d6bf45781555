"""A part of what was recorded into a file of its own, after the state it begins with; bookmarks of its time go along.

The messages are told anew, without what is damaged, and what a recording has besides (keyframes, delta checkpoints,
summaries) is made again: the file is whole in itself.

Owns what becomes of the file when that ends early. Knows neither rings nor who asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.telemetry import Frame, Snapshot
from kvscope_telemetry.recorded import Recorded
from kvscope_telemetry.recordings.keyframes import snapshot_of
from kvscope_telemetry.recordings.read_budget import ProgressCallback
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.state.continuity import Continuity
from kvscope_telemetry.summaries.bookmark import Bookmark, in_order, settled
from kvscope_telemetry.texts.block_texts import RecordedText

_LOOK_EVERY: Final = 256
_MAX_QUEUED_BYTES: Final = 4 << 20
"""Reading is quicker than writing: more of it would only wait, in several times these bytes of memory."""
_TEXTS_TOGETHER: Final = 256
_TEXTS_LATE_NS: Final = 5_000_000_000
"""A text is written so long after its block was so at most."""


def save(
    recorded: Recorded,
    path: Path | str,
    from_s: float,
    until_s: float | None = None,
    *,
    watch: ProgressCallback | None = None,
) -> bool:
    """Write what was recorded from `from_s` until `until_s` (both included) to `path`, which ends in `.mcap`.

    It is called `path.part` until it is whole. False: `watch` ended it, and nothing is left of it; nor is anything when
    it fails. Raises BadInput for a path that will not do, KvscopeError for a disk that is full.
    """
    until_s = recorded.info.duration_s if until_s is None else until_s
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
    recorded: Recorded, writer: RecordingWriter, from_s: float, until_s: float, watch: ProgressCallback | None
) -> bool:
    from_s = max(from_s, recorded.first_s)
    begin_ns, until_ns = recorded.start_ns + round(from_s * 1e9), recorded.start_ns + round(until_s * 1e9)
    from_ns, continuity = begin_ns, Continuity()
    state = _write_state(recorded, writer, from_s, from_ns)
    if state is not None:
        continuity.takes(state)
        from_ns += 1  # the state has all until then
    for count, (log_time_ns, message) in enumerate(recorded.timed_messages(from_ns, until_ns, keyframes=True)):
        if count % _LOOK_EVERY == 0 and not _goes_on(watch, log_time_ns - from_ns, until_ns - from_ns):
            return False
        # Keyframes are made anew; behind damage one of them, or the state from delta checkpoints, is what goes on.
        if isinstance(message, Frame | Snapshot) and not continuity.takes(message) and isinstance(message, Snapshot):
            continue
        if not writer.write(message, wait=True, log_time_ns=log_time_ns):
            break
    for bookmark in bookmarks_of(recorded, begin_ns, until_ns):
        writer.mark(bookmark)
    for texts in texts_of(recorded, from_ns, until_ns):
        writer.write_texts(texts, wait=True)
    return _goes_on(watch, 1, 1)


def _write_state(recorded: Recorded, writer: RecordingWriter, from_s: float, from_ns: int) -> Snapshot | None:
    """Begin with the state at `from_s`; None where there is none."""
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


def bookmarks_of(recorded: Recorded, from_ns: int, until_ns: int) -> list[Bookmark]:
    """Those of this time, as they stand."""
    stand = in_order(settled(recorded.bookmarks()).values())
    return [each for each in stand if from_ns <= max(each.time_ns, each.until_ns) and each.time_ns <= until_ns]


def texts_of(recorded: Recorded, from_ns: int, until_ns: int) -> Iterator[list[RecordedText]]:
    """Those of this time, and of before it the newest of each block: it may still be held. Some at once."""
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
            yield texts[start : start + _TEXTS_TOGETHER]


def _goes_on(watch: ProgressCallback | None, done: int, total: int) -> bool:
    return watch is None or watch(min(1.0, done / max(1, total)))
