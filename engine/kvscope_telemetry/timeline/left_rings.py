"""Rings that a crashed session left behind: what is in each, until somebody keeps or discards it.

Knows neither who wrote them nor who asks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.timeline.ring_folder import delete_ring, hold, segments_in

EMPTY_BYTES: Final = 512
"""Less than a file with a single hello."""


@dataclass(frozen=True, slots=True)
class LeftRing:
    """A ring that nobody writes any more."""

    folder: Path
    model: str
    start_ns: int
    """When what is left of it begins, by the wall clock: nanoseconds since 1970."""
    seconds: float
    num_bytes: int

    def discard(self) -> None:
        """Delete it. Raises BadInput when somebody holds it now."""
        lock = hold(self.folder, make=True)
        try:
            delete_ring(self.folder)
        finally:
            os.close(lock)


def left_rings(parent: Path | str) -> list[LeftRing]:
    """Those in the folders of `parent` whose owner is dead, the newest first.

    What cannot be read is left out; where nothing had been recorded yet the folder is taken away.
    """
    try:
        folders = [Path(entry.path) for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    found = [ring for ring in map(_left_ring, folders) if ring is not None]
    return sorted(found, key=lambda ring: ring.start_ns, reverse=True)


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
        oldest, newest = _readable(segments.values()), _readable(reversed(segments.values()))
        seconds = (newest.end_ns - oldest.start_ns) / 1e9
        return LeftRing(folder, newest.info.hello.model.name, oldest.start_ns, seconds, num_bytes)
    except (BadInput, OSError):
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
