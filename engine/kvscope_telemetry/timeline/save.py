"""A part of what was recorded into a file of its own: what was written, as it was written, after the state it begins
with.

Owns what becomes of the file when that ends early. Knows neither rings nor who asks.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.recorded import Recorded
from kvscope_telemetry.recordings.effort import Watch
from kvscope_telemetry.recordings.keyframes import snapshot_of
from kvscope_telemetry.recordings.layout import KEYFRAMES, OTHERS, STATE
from kvscope_telemetry.recordings.mcap_file import McapFile

_LOOK_EVERY: Final = 256


def save(
    recorded: Recorded, path: Path | str, from_s: float, until_s: float | None = None, *, watch: Watch | None = None
) -> bool:
    """Write what was recorded from `from_s` until `until_s` (both included) to `path`, which ends in `.mcap`.

    It is called `path.part` until it is whole. False: `watch` ended it, and nothing is left of it; nor is anything when
    it fails. Raises BadInput for a path that will not do, KvscopeError for a disk that is full.
    """
    file = McapFile(Path(path))
    try:
        is_whole = _copy(recorded, file, from_s, until_s, watch)
        if is_whole:
            file.finish()
    except OSError as error:
        _give_up(file)
        raise KvscopeError(f"recording {str(path)!r} cannot be written: {error.strerror or error}") from None
    except BaseException:
        _give_up(file)
        raise
    if not is_whole:
        _give_up(file)
    return is_whole


def _copy(recorded: Recorded, file: McapFile, from_s: float, until_s: float | None, watch: Watch | None) -> bool:
    from_s = max(from_s, recorded.first_s)
    until_s = recorded.info.duration_s if until_s is None else until_s
    start_ns = recorded.start_ns
    from_ns, until_ns = start_ns + round(from_s * 1e9), start_ns + round(until_s * 1e9)
    if _add_state(recorded, file, from_s, from_ns):
        from_ns += 1  # the state has all until then
    for count, stored in enumerate(recorded.raw_messages(from_ns, until_ns)):
        if count % _LOOK_EVERY == 0 and not _goes_on(watch, stored.log_time_ns - from_ns, until_ns - from_ns):
            return False
        file.add(stored.kind, stored.log_time_ns, stored.data)
    return _goes_on(watch, 1, 1)


def _add_state(recorded: Recorded, file: McapFile, from_s: float, from_ns: int) -> bool:
    """Begin with the state at `from_s`; whether there is one."""
    mirror = recorded.state_at(from_s)
    if mirror.hello is None:
        return False
    file.add(STATE, from_ns, encode(mirror.hello))
    memory = recorded.memory_before(from_s, mirror.hello.epoch)
    if memory is not None:
        file.add(OTHERS, from_ns, encode(memory))
    file.add(KEYFRAMES, from_ns, encode(snapshot_of(mirror)))
    return True


def _goes_on(watch: Watch | None, done: int, total: int) -> bool:
    return watch is None or watch(min(1.0, done / max(1, total)))


def _give_up(file: McapFile) -> None:
    with contextlib.suppress(OSError):  # the disk may be full
        file.abandon()
    file.part.unlink(missing_ok=True)
