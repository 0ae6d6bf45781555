"""Opens a recording on its own thread. Imports no Qt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvscope_app.session.background import Background
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback

if TYPE_CHECKING:
    from kvscope_telemetry.recordings.reader import Recording


class RecordingOpening(Background["Recording"]):
    """Opening of one recording, which starts in the constructor.

    At the end, either `recording` or `failure` is set, unless it was cancelled.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(self._open, "kvscope-open")

    @property
    def recording(self) -> Recording | None:
        return self.result

    def _open(self, watch: ProgressCallback) -> Recording:
        from kvscope_telemetry.recordings.reader import Recording  # imported late: not needed by most windows

        try:
            return Recording.open(self.path, watch)
        except (KvscopeError, OpeningCancelled):
            raise
        except Exception as error:  # reported, because a thread that ended silently looks like one that still runs
            raise KvscopeError(f"recording {self.path!r} cannot be opened: {error!r:.200}") from error
