"""Opening a recording on a thread of its own. Owns the thread and what it found. Knows no Qt and no window."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvscope_telemetry.errors import KvscopeError

if TYPE_CHECKING:
    from kvscope_telemetry.recordings.reader import Recording


class RecordingOpening:
    """Begins at once. When it is over, one of `recording` and `failure` is there, or it was given up."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.share = 0.0
        """What is done, 0 to 1."""
        self.recording: Recording | None = None
        self.failure = ""
        """Why it cannot be opened, in one line."""
        self._is_unwanted = threading.Event()
        self._thread = threading.Thread(target=self._open, name="kvscope-open", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the thread ended."""
        return not self._thread.is_alive()

    @property
    def is_unwanted(self) -> bool:
        """Whether it was given up."""
        return self._is_unwanted.is_set()

    def cancel(self) -> None:
        """Give it up; the thread ends soon after."""
        self._is_unwanted.set()

    def wait(self, seconds: float) -> bool:
        """Whether it is over within `seconds`."""
        self._thread.join(seconds)
        return self.is_over

    # The thread.

    def _open(self) -> None:
        from kvscope_telemetry.recordings.effort import OpeningCancelled  # most windows need none of it
        from kvscope_telemetry.recordings.reader import Recording

        try:
            self.recording = Recording.open(self.path, self._watch)
        except OpeningCancelled:
            pass
        except KvscopeError as error:
            self.failure = str(error)
        except Exception as error:  # told in the window: an opening that died silently looks like one that goes on
            self.failure = f"recording {self.path!r} cannot be opened: {error!r:.200}"

    def _watch(self, share: float) -> bool:
        self.share = share
        return not self.is_unwanted
