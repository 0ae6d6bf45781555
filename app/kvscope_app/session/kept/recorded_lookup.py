"""Looks things up in a recording one at a time, on a thread; the one that was asked for last comes next.

Owns what was found, which one is wanted and which is being read. Must not know what is looked for, nor who asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

from PySide6.QtCore import QObject, Signal

from kvscope_app.session.kept.recorded_reading import RecordedReading

if TYPE_CHECKING:
    from kvscope_app.session.session import Session
    from kvscope_telemetry.recordings.read_budget import ProgressCallback
    from kvscope_telemetry.recordings.reader import Recording

_Key = TypeVar("_Key", bound=Hashable)
_Found = TypeVar("_Found")


class RecordedLookup(QObject, Generic[_Key, _Found]):
    """Ask `get`; `found` tells that asking again is worth it. Keeps the `most_kept` newest answers.

    `read` is called on the thread: it looks for a key about a wall-clock time in ns; None where it is not there.
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
        self._reading: RecordedReading[_Found | None] = RecordedReading(session, name, self)
        self._reading.over.connect(self._take)

    @property
    def is_reading(self) -> bool:
        """Whether `found` will tell."""
        return self._reading.is_reading

    @property
    def failure(self) -> str:
        """Why the last look failed, empty where it did not: what it looked for may be there."""
        return self._reading.failure

    def get(self, key: _Key, at_ns: int) -> _Found | None:
        """What was found for `key`, about at `at_ns`; None while it is not known, and where it is not there."""
        if key in self._known:
            return self._known[key]
        if key != self._key:
            self._wanted = (key, at_ns)
            self._go_on()
        return None

    def close(self) -> None:
        """No more."""
        self._wanted = None
        self._reading.close()

    def _take(self) -> None:
        if self._key is not None:
            self._known[self._key] = self._reading.made
            while len(self._known) > self._most_kept:
                self._known.popitem(last=False)
        self._key = None
        self._go_on()
        self.found.emit()

    def _go_on(self) -> None:
        if self._wanted is None or self._reading.is_reading:
            return
        (key, at_ns), self._wanted, read = self._wanted, None, self._read
        if self._reading.begin(lambda recorded, watch: read(recorded, key, at_ns, watch)):
            self._key = key
