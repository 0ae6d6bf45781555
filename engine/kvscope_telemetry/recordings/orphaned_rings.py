"""Manages ring recordings left behind by crashed sessions, until the user keeps or discards them or they exceed a
limit.

Owns the limits on their total size and age. Must not depend on the code that writes rings or shows them.
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
"""Size in bytes below which a ring counts as empty. A file with only a hello is larger."""
MAX_ORPHANED_BYTES: Final = 2 << 30
"""Limit on the total size of all orphaned rings. The newest is kept even if it alone is larger."""
MAX_ORPHANED_S: Final = 7 * 24 * 3600.0
"""Age limit of orphaned rings in seconds, measured from a ring's end. The newest ring may be older
(`remove_orphaned_rings`).
"""


@dataclass(frozen=True, slots=True)
class OrphanedRing:
    folder: Path
    model: str
    start_ns: int
    seconds: float
    num_bytes: int
    is_readable: bool = True

    @property
    def end_ns(self) -> int:
        return self.start_ns + round(self.seconds * 1e9)

    def discard(self) -> None:
        """Delete the ring. Raises BadInput if another process has locked it."""
        lock = hold(self.folder, make=True)
        try:
            delete_ring(self.folder)
        finally:
            os.close(lock)


@dataclass(frozen=True, slots=True)
class RemovedRings:
    kept: list[OrphanedRing]
    discarded: list[OrphanedRing]


def remove_orphaned_rings(
    parent: Path | str, *, max_bytes: int = MAX_ORPHANED_BYTES, max_seconds: float = MAX_ORPHANED_S
) -> RemovedRings:
    """Discard rings older than `max_seconds`, then the oldest ones until those left fit into `max_bytes`.

    Age is measured from now or from the end of the newest ring, whichever is earlier: with a clock that is years ahead,
    every ring would seem too old. Therefore the newest ring is never discarded for its age.
    """
    kept: list[OrphanedRing] = []
    discarded: list[OrphanedRing] = []
    rings = find_orphaned_rings(parent)
    newest_ns = min([time.time_ns(), *(ring.end_ns for ring in rings[:1])])
    num_bytes, oldest_ns = 0, newest_ns - round(max_seconds * 1e9)
    for ring in rings:
        num_bytes += ring.num_bytes
        if ring.end_ns >= oldest_ns and (num_bytes <= max_bytes or not kept):
            kept.append(ring)
            continue
        try:
            ring.discard()
        except BadInput:  # opened by another process
            continue
        discarded.append(ring)
    return RemovedRings([ring for ring in kept if ring.is_readable], discarded)


def find_orphaned_rings(parent: Path | str) -> list[OrphanedRing]:
    """Return the rings in `parent` without a running writer, newest first, including unreadable ones.

    Deletes folders in which nothing was recorded.
    """
    try:
        folders = [Path(entry.path) for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    rings = [ring for ring in map(_orphaned_ring, folders) if ring is not None]
    return sorted(rings, key=lambda ring: ring.end_ns, reverse=True)


def _orphaned_ring(folder: Path) -> OrphanedRing | None:
    segments = segments_in(folder)
    if not segments:  # may be starting just now
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
            oldest, newest = _first_readable(segments.values()), _first_readable(reversed(segments.values()))
        except BadInput:
            changed_ns = max(path.stat().st_mtime_ns for path in segments.values())
            return OrphanedRing(folder, "", changed_ns, 0.0, num_bytes, is_readable=False)
        seconds = (newest.end_ns - oldest.start_ns) / 1e9
        return OrphanedRing(folder, newest.info.hello.model.name, oldest.start_ns, seconds, num_bytes)
    except OSError:
        return None
    finally:
        os.close(lock)


def _first_readable(paths: Iterable[Path]) -> Recording:
    for path in paths:
        try:
            return Recording.open(path)
        except BadInput:
            continue
    raise BadInput("no segment can be read")
