"""Opening a recording away from the GUI thread: it may take a while, and can be given up.

Owns the thread and what it found, until somebody is told. Knows no window; signals are emitted on the GUI thread.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_telemetry.errors import KvscopeError

if TYPE_CHECKING:
    from kvscope_telemetry.recordings.reader import Recording

_LOOK_MS: Final = 30


class FileOpening(QObject):
    """Begins at once. Exactly one of `opened`, `failed` and `cancelled` comes, then it is of no more use."""

    progressed = Signal(float)
    """The share that is done, 0 to 1."""
    opened = Signal(object)
    """The `Recording`."""
    failed = Signal(str)
    """Why it cannot be opened, in one line."""
    cancelled = Signal()

    def __init__(self, path: str, parent: QObject) -> None:
        super().__init__(parent)
        self._path = path
        self._share = 0.0
        self._is_unwanted = threading.Event()
        self._found: Recording | str | None = None
        self._thread = threading.Thread(target=self._open, name="kvscope-open", daemon=True)
        self._thread.start()
        self._clock = QTimer(self, interval=_LOOK_MS)
        self._clock.timeout.connect(self._look)
        self._clock.start()

    def cancel(self) -> None:
        """Give it up; the thread ends soon after."""
        self._is_unwanted.set()

    def _look(self) -> None:
        if self._thread.is_alive():
            self.progressed.emit(self._share)
            return
        self._clock.stop()
        if self._found is None or self._is_unwanted.is_set():
            self.cancelled.emit()
        elif isinstance(self._found, str):
            self.failed.emit(self._found)
        else:
            self.opened.emit(self._found)

    # The thread.

    def _open(self) -> None:
        from kvscope_telemetry.recordings.effort import OpeningCancelled  # most windows need none of it
        from kvscope_telemetry.recordings.reader import Recording

        try:
            self._found = Recording.open(self._path, self._watch)
        except OpeningCancelled:
            self._found = None
        except KvscopeError as error:
            self._found = str(error)
        except Exception as error:  # told in the window: an opening that died silently looks like one that goes on
            self._found = f"recording {self._path!r} cannot be opened: {error!r:.200}"

    def _watch(self, share: float) -> bool:
        self._share = share
        return not self._is_unwanted.is_set()
