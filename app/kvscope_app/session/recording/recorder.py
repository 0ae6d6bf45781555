"""Recording that a window writes in addition to the ring: its duration, size and failure. Imports no Qt."""

from __future__ import annotations

import time
from pathlib import Path

from kvscope_telemetry.recordings.writer import RecordingWriter


class Recorder:
    """Recording that is written to `path` from construction on. Raises BadInput if `path` cannot be written."""

    def __init__(self, path: Path) -> None:
        self.writer = RecordingWriter(path)
        self._began_s = time.monotonic()

    @property
    def path(self) -> Path:
        """Final path of the file, which has another name until it is complete."""
        return self.writer.path

    @property
    def failure(self) -> str:
        return self.writer.failure

    @property
    def text(self) -> str:
        """Duration and size of the recording, such as `0:12  3.4 MB`."""
        seconds = int(time.monotonic() - self._began_s)
        try:
            num_bytes = self.writer.part.stat().st_size
        except OSError:
            num_bytes = 0
        return f"{seconds // 60}:{seconds % 60:02d}  {num_bytes / 1e6:.1f} MB"
