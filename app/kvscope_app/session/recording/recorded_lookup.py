"""Finds facts about requests or other keys in a recording, on a thread, one key at a time. Works with any type of key.

Owns the results, the key being searched for, and the key requested last, which is searched for next.
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
_Result = TypeVar("_Result")


class RecordedLookup(QObject, Generic[_Key, _Result]):
    """Finds results for keys in the session's recording on a worker thread, and caches the newest `max_results`
    results.

    `get` returns cached results only; call it again after `found` was emitted. `read` runs on the worker thread: it
    searches for a key near a wall-clock time in ns, and returns None if there is no result.
    """

    found = Signal()

    def __init__(
        self,
        session: Session,
        read: Callable[[Recording, _Key, int, ProgressCallback], _Result | None],
        name: str,
        max_results: int,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._read, self._max_results = read, max_results
        self._results: OrderedDict[_Key, _Result | None] = OrderedDict()
        self._requested: tuple[_Key, int] | None = None
        self._current_key: _Key | None = None
        self._reader: RecordingReader[_Result | None] = RecordingReader(session, name, self)
        self._reader.finished.connect(self._store_result)

    @property
    def is_reading(self) -> bool:
        return self._reader.is_reading

    @property
    def failure(self) -> str:
        """Reason why the last lookup failed, empty without an error. The recording may contain the requested key
        nevertheless.
        """
        return self._reader.failure

    def get(self, key: _Key, at_ns: int) -> _Result | None:
        """Return the cached result for `key`, or None if there is no result or it is not known yet.

        A key that is not cached is looked up next, near `at_ns`, unless another key is requested before that.
        """
        if key in self._results:
            return self._results[key]
        if key != self._current_key:
            self._requested = (key, at_ns)
            self._start_next()
        return None

    def close(self) -> None:
        self._requested = None
        self._reader.close()

    def _store_result(self) -> None:
        if self._current_key is not None:
            self._results[self._current_key] = self._reader.result
            while len(self._results) > self._max_results:
                self._results.popitem(last=False)
        self._current_key = None
        self._start_next()
        self.found.emit()

    def _start_next(self) -> None:
        if self._requested is None or self._reader.is_reading:
            return
        (key, at_ns), self._requested, read = self._requested, None, self._read
        if self._reader.start(lambda recorded, watch: read(recorded, key, at_ns, watch)):
            self._current_key = key
