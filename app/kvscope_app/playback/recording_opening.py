"""Opening a recording on a thread of its own. Knows no Qt and no window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvscope_app.session.background import Background
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback

if TYPE_CHECKING:
    from kvscope_telemetry.recordings.reader import Recording


class RecordingOpening(Background["Recording"]):
    """Begins at once. When it is over, one of `recording` and `failure` is there, or it was given up."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(self._open, "kvscope-open")

    @property
    def recording(self) -> Recording | None:
        """What was opened."""
        return self.made

    def _open(self, watch: ProgressCallback) -> Recording:
        from kvscope_telemetry.recordings.reader import Recording  # most windows need none of it

        try:
            return Recording.open(self.path, watch)
        except (KvscopeError, OpeningCancelled):
            raise
        except Exception as error:  # told in the window: an opening that died silently looks like one that goes on
            raise KvscopeError(f"recording {self.path!r} cannot be opened: {error!r:.200}") from error
