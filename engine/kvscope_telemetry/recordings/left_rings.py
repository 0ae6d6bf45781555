"""Rings that crashed sessions left behind: what each contains, until somebody keeps or discards it, or they take too
much space.

Owns how much is kept of them together, and for how long. Knows neither who wrote them nor who asks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.ring_folder import delete_ring, hold, segments_in

EMPTY_BYTES: Final = 512
"""Less than a file with a single hello."""
MAX_LEFT_BYTES: Final = 2 << 30
"""Of all of them together; the newest is kept even if it alone is larger."""
MAX_LEFT_S: Final = 7 * 24 * 3600.0
"""A ring is kept this long after its end, and the newest one longer (`tidy_left_rings`)."""


@dataclass(frozen=True, slots=True)
class LeftRing:
    """A ring that nobody writes any more."""

    folder: Path
    model: str
    start_ns: int
    """When what is left of it begins, by the wall clock: nanoseconds since 1970."""
    seconds: float
    num_bytes: int
    is_readable: bool = True

    @property
    def end_ns(self) -> int:
        """When it ends."""
        return self.start_ns + round(self.seconds * 1e9)

    def discard(self) -> None:
        """Delete it. Raises BadInput when somebody holds it now."""
        lock = hold(self.folder, make=True)
        try:
            delete_ring(self.folder)
        finally:
            os.close(lock)


@dataclass(frozen=True, slots=True)
class TidiedRings:
    """What is left, and what went for it."""

    kept: list[LeftRing]
    """Those that can be read, the newest first."""
    discarded: list[LeftRing]


def tidy_left_rings(
    parent: Path | str, *, max_bytes: int = MAX_LEFT_BYTES, max_seconds: float = MAX_LEFT_S
) -> TidiedRings:
    """Discard what is older than `max_seconds`, and the oldest of those that are more than `max_bytes` together.

    Age counts up to now or up to the end of the newest ring, whichever is earlier: where the clock is years ahead,
    every ring would seem too old. So the newest ring is never discarded for its age.
    """
    kept: list[LeftRing] = []
    discarded: list[LeftRing] = []
    rings = left_rings(parent)
    newest_ns = min([time.time_ns(), *(ring.end_ns for ring in rings[:1])])
    num_bytes, oldest_ns = 0, newest_ns - round(max_seconds * 1e9)
    for ring in rings:
        num_bytes += ring.num_bytes
        if ring.end_ns >= oldest_ns and (num_bytes <= max_bytes or not kept):
            kept.append(ring)
            continue
        try:
            ring.discard()
        except BadInput:  # somebody opened it
            continue
        discarded.append(ring)
    return TidiedRings([ring for ring in kept if ring.is_readable], discarded)


def left_rings(parent: Path | str) -> list[LeftRing]:
    """Those in the folders of `parent` whose owner is dead, the newest first, with those that cannot be read.

    Where nothing had been recorded yet the folder is taken away.
    """
    try:
        folders = [Path(entry.path) for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    found = [ring for ring in map(_left_ring, folders) if ring is not None]
    return sorted(found, key=lambda ring: ring.end_ns, reverse=True)


def _left_ring(folder: Path) -> LeftRing | None:
    segments = segments_in(folder)
    if not segments:  # perhaps one that begins just now
        return None
    try:
        lock = hold(folder)
    except BadInput:
        return None
    try:
        num_bytes = sum(path.stat().st_size for path in segments.values())
        if num_bytes < EMPTY_BYTES:
            delete_ring(folder)
            return None
        try:
            oldest, newest = _readable(segments.values()), _readable(reversed(segments.values()))
        except BadInput:
            changed_ns = max(path.stat().st_mtime_ns for path in segments.values())
            return LeftRing(folder, "", changed_ns, 0.0, num_bytes, is_readable=False)
        seconds = (newest.end_ns - oldest.start_ns) / 1e9
        return LeftRing(folder, newest.info.hello.model.name, oldest.start_ns, seconds, num_bytes)
    except OSError:
        return None
    finally:
        os.close(lock)


def _readable(paths: Iterable[Path]) -> Recording:
    """The first that can be read. Raises BadInput when none can."""
    for path in paths:
        try:
            return Recording.open(path)
        except BadInput:
            continue
    raise BadInput("no segment can be read")
