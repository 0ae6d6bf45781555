"""Looks up keys in a recording on a thread, one at a time. The key requested last is looked up next.

Owns the results, the wanted key and the current key. Must not know the meaning of the keys or the callers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

from PySide6.QtCore import QObject, Signal

from kvscope_app.session.recording.recording_reader import RecordingReader

if TYPE_CHECKING:
    from kvscope_app.session.session import Session
    from kvscope_telemetry.recordings.read_budget import ProgressCallback
    from kvscope_telemetry.recordings.reader import Recording

_Key = TypeVar("_Key", bound=Hashable)
_Found = TypeVar("_Found")


class RecordedLookup(QObject, Generic[_Key, _Found]):
    """Looks up keys in the session's recording on a worker thread, and caches the `most_kept` newest results.

    `get` returns cached results only; call it again after `found` was emitted. `read` runs on the worker thread: it
    looks up a key near a wall-clock time in ns and returns None if there is no result.
    """

    found = Signal()

    def __init__(
        self,
        session: Session,
        read: Callable[[Recording, _Key, int, ProgressCallback], _Found | None],
        name: str,
        most_kept: int,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._read, self._most_kept = read, most_kept
        self._known: OrderedDict[_Key, _Found | None] = OrderedDict()
        self._wanted: tuple[_Key, int] | None = None
        self._key: _Key | None = None
        self._reading: RecordingReader[_Found | None] = RecordingReader(session, name, self)
        self._reading.finished.connect(self._take)

    @property
    def is_reading(self) -> bool:
        """Whether a lookup is in progress, so that `found` will be emitted."""
        return self._reading.is_reading

    @property
    def failure(self) -> str:
        """Why the last lookup failed, else empty. Its key may exist nevertheless."""
        return self._reading.failure

    def get(self, key: _Key, at_ns: int) -> _Found | None:
        """Return the result for `key` near `at_ns`, or None if it does not exist or is not known yet."""
        if key in self._known:
            return self._known[key]
        if key != self._key:
            self._wanted = (key, at_ns)
            self._go_on()
        return None

    def close(self) -> None:
        self._wanted = None
        self._reading.close()

    def _take(self) -> None:
        if self._key is not None:
            self._known[self._key] = self._reading.result
            while len(self._known) > self._most_kept:
                self._known.popitem(last=False)
        self._key = None
        self._go_on()
        self.found.emit()

    def _go_on(self) -> None:
        if self._wanted is None or self._reading.is_reading:
            return
        (key, at_ns), self._wanted, read = self._wanted, None, self._read
        if self._reading.start(lambda recorded, watch: read(recorded, key, at_ns, watch)):
            self._key = key
