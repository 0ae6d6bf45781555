"""A recording that the window writes beside the ring: since when, how much, and why it ended. Knows no Qt."""

from __future__ import annotations

import time
from pathlib import Path

from kvscope_telemetry.recordings.writer import RecordingWriter


class Recorder:
    """Writes `path` from now on. Raises BadInput for a path that will not do."""

    def __init__(self, path: Path) -> None:
        self.writer = RecordingWriter(path)
        self._began_s = time.monotonic()

    @property
    def path(self) -> Path:
        """What it is called once it is whole."""
        return self.writer.path

    @property
    def failure(self) -> str:
        """Why it ended before its time; empty while all is well."""
        return self.writer.failure

    @property
    def text(self) -> str:
        """`0:12  3.4 MB`."""
        seconds = int(time.monotonic() - self._began_s)
        try:
            num_bytes = self.writer.part.stat().st_size
        except OSError:
            num_bytes = 0
        return f"{seconds // 60}:{seconds % 60:02d}  {num_bytes / 1e6:.1f} MB"
