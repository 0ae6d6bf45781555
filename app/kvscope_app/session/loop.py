"""A range that is played over and over: set at its two ends, until it is cleared.

Owns the range and the clock that looks whether its end is reached; without a range there is none.
"""

from __future__ import annotations

from typing import Final, Protocol

from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.session.links import Player

_LOOK_MS: Final = 30
SHORTEST_NS: Final = 20_000_000


class Played(Protocol):
    """A session, as far as a loop asks it."""

    is_file: bool

    @property
    def paused(self) -> bool: ...
    @property
    def is_playing(self) -> bool: ...
    @property
    def cursor_ns(self) -> int: ...
    @property
    def player(self) -> Player | None: ...
    def go_to(self, time_ns: int) -> None: ...
    def play(self) -> None: ...


class Loop(QObject):
    """Of one session. Times are wall clock, as the cursor's."""

    changed = Signal()

    def __init__(self, session: Played, parent: QObject) -> None:
        super().__init__(parent)
        self._session = session
        self.begin_ns: int | None = None
        self.end_ns: int | None = None
        self._clock = QTimer(self, interval=_LOOK_MS)
        self._clock.timeout.connect(self._look)

    @property
    def range_ns(self) -> tuple[int, int] | None:
        """Once both ends are set."""
        if self.begin_ns is None or self.end_ns is None:
            return None
        return self.begin_ns, self.end_ns

    def set_begin(self, time_ns: int) -> None:
        """Begin at `time_ns`; an end that is not after it goes."""
        self.begin_ns = time_ns
        if self.end_ns is not None and self.end_ns < time_ns + SHORTEST_NS:
            self.end_ns = None
        self._settle()

    def set_end(self, time_ns: int) -> None:
        """End at `time_ns`; a begin that is not before it goes."""
        self.end_ns = time_ns
        if self.begin_ns is not None and self.begin_ns > time_ns - SHORTEST_NS:
            self.begin_ns = None
        self._settle()

    def set_bound(self, time_ns: int, *, is_begin: bool) -> None:
        """One of the two; with both it is played, from its begin on."""
        (self.set_begin if is_begin else self.set_end)(time_ns)
        if self.range_ns is not None:
            self.play()

    def set_range(self, begin_ns: int, end_ns: int) -> None:
        """Both at once, in any order, and begin to play there."""
        self.begin_ns, self.end_ns = min(begin_ns, end_ns), max(begin_ns, end_ns)
        if self.end_ns - self.begin_ns < SHORTEST_NS:
            self.end_ns = None
        self._settle()

    def clear(self) -> bool:
        """No more; whether there was anything of one."""
        was = (self.begin_ns, self.end_ns) != (None, None)
        self.begin_ns = self.end_ns = None
        self._settle()
        return was

    def play(self) -> None:
        """From its begin on."""
        if self.begin_ns is not None:
            self._session.go_to(self.begin_ns)
            self._session.play()

    def _settle(self) -> None:
        if self.range_ns is None:
            self._clock.stop()
        elif not self._clock.isActive():  # a bound that is dragged does not put off the look
            self._clock.start()
        self.changed.emit()

    def _look(self) -> None:
        """Away from the live end, what is beyond the end goes back to the begin; so does what stands at the end."""
        session, around = self._session, self.range_ns
        if around is None or not (session.paused or session.is_file):
            return
        player = session.player
        is_over = player is not None and player.is_at_end and session.cursor_ns >= around[1] - SHORTEST_NS
        if session.is_playing and (session.cursor_ns >= around[1] or is_over):
            session.go_to(around[0])
            if is_over:
                session.play()
