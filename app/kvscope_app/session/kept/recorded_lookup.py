"""Things looked up one after the other in what was recorded, on a thread: the one that was asked for last comes next.

Owns what was found, which one is wanted and which is being read. Must not know what is looked for, nor who asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.session.background import Background
from kvscope_app.session.kept.own_handle import OwnHandle

if TYPE_CHECKING:
    from kvscope_app.session.session import Session
    from kvscope_telemetry.recorded import Recorded
    from kvscope_telemetry.recordings.effort import Watch

_LOOK_MS: Final = 60
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
        read: Callable[[Recorded, _Key, int, Watch], _Found | None],
        name: str,
        most_kept: int,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._session, self._read, self._name, self._most_kept = session, read, name, most_kept
        self._handle: OwnHandle | None = None
        self._known: OrderedDict[_Key, _Found | None] = OrderedDict()
        self._wanted: tuple[_Key, int] | None = None
        self._reading: _Key | None = None
        self._work: Background[_Found | None] | None = None
        self._timer = QTimer(self, interval=_LOOK_MS)
        self._timer.timeout.connect(self._look)

    @property
    def is_reading(self) -> bool:
        """Whether `found` will tell."""
        return self._work is not None or self._wanted is not None

    def get(self, key: _Key, at_ns: int) -> _Found | None:
        """What was found for `key`, about at `at_ns`; None while it is not known, and where it is not there."""
        if key in self._known:
            return self._known[key]
        if key != self._reading:
            self._handle = self._handle or self._session.own_handle()
            if self._handle is not None:
                self._wanted = (key, at_ns)
                if not self._timer.isActive():  # who asks at each frame must not put off the look
                    self._timer.start()
        return None

    def close(self) -> None:
        """No more."""
        self._timer.stop()
        self._wanted = None
        if self._work is not None:
            self._work.cancel()
            self._work.wait(2.0)

    def _look(self) -> None:
        if self._work is not None and self._work.is_over:
            if self._reading is not None:
                self._known[self._reading] = self._work.made
                while len(self._known) > self._most_kept:
                    self._known.popitem(last=False)
            self._work = self._reading = None
            self.found.emit()
        if self._work is None and self._wanted is not None and self._handle is not None:
            key, at_ns = self._wanted
            self._wanted, self._reading = None, key
            self._work = Background(self._reading_of(self._handle, key, at_ns), self._name)
        if self._work is None:
            self._timer.stop()

    def _reading_of(self, handle: OwnHandle, key: _Key, at_ns: int) -> Callable[[Watch], _Found | None]:
        read = self._read
        return lambda watch: read(handle.get(watch), key, at_ns, watch)
