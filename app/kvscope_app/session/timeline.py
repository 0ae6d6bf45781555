"""What a timeline is: a stretch of time with a cursor on it, and what moves the cursor.

A session has one (`source_timeline.py`): an engine's with what was kept of it, or a recording's. Two sessions that are
compared are one (`compare/pair.py`). The bar and the keys of playing move any of them by this alone.

Owns the range that is played over and over, which every timeline may have.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Protocol

from PySide6.QtCore import QObject, QTimer, Signal, SignalInstance

from kvscope_app.session.visible_range import VisibleRange
from kvscope_telemetry.summaries.summary import TimedEvent

_LOOK_MS: Final = 30
SHORTEST_NS: Final = 20_000_000


class Timeline(Protocol):
    """Times are nanoseconds since 1970, by the timeline's own clock. Signals have no arguments."""

    @property
    def paused_changed(self) -> SignalInstance:
        """The cursor left the end that goes on, or is back there."""

    @property
    def cursor_changed(self) -> SignalInstance:
        """What is shown is another moment than before, or its past is known better."""

    @property
    def is_file(self) -> bool:
        """Whether there is no end that goes on: what was recorded is played."""

    @property
    def range_ns(self) -> tuple[int, int] | None:
        """First and last moment there is to go to; None while there is none."""

    @property
    def origin_ns(self) -> int | None:
        """Where positions count from; it does not move."""

    @property
    def cursor_ns(self) -> int:
        """The moment that is shown."""

    @property
    def paused(self) -> bool:
        """Whether the cursor is away from an end that goes on."""

    @property
    def is_live(self) -> bool:
        """Whether the cursor is at an end that goes on."""

    @property
    def is_playing(self) -> bool:
        """Whether what is shown goes on."""

    @property
    def is_at_end(self) -> bool:
        """Whether there is nothing more to play."""

    @property
    def speed(self) -> float:
        """Recorded seconds a second."""

    @property
    def visible_range(self) -> VisibleRange:
        """The range to which a person zoomed, shared by the linked views."""

    @property
    def loop(self) -> Loop:
        """What is played over and over."""

    @property
    def is_before_event(self) -> bool:
        """Whether the state before the event that a person went to is shown, rather than the one after it."""

    def go_to(self, time_ns: int) -> None:
        """Move the cursor, as near to `time_ns` as there is something."""

    def go_live(self) -> None:
        """Go to the end."""

    def jump_by(self, seconds: float) -> None:
        """Forward, or back with a negative number."""

    def step_frames(self, num_frames: int) -> None:
        """Stand still so many frames of the engine further, or back."""

    def go_to_event(self, kinds: Collection[str] | None, *, forward: bool) -> TimedEvent | None:
        """Show the next event of `kinds` (None: of any), or the one before; which that is."""

    def switch_event_side(self) -> TimedEvent | None:
        """Show the state before the event that is shown, and from there the one after it; None where none is."""

    def pause(self) -> None:
        """Stand still here."""

    def play(self) -> None:
        """Go on from here."""

    def set_speed(self, factor: float) -> None:
        """Play so many times as fast. Raises BadInput for what is not accepted."""


class Loop(QObject):
    """A range of a timeline that is played over and over: set at its two ends, until it is cleared.

    Owns the range and the clock that looks whether its end is reached; without a range there is none.
    """

    changed = Signal()

    def __init__(self, timeline: Timeline, parent: QObject) -> None:
        super().__init__(parent)
        self._timeline = timeline
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
            self._timeline.go_to(self.begin_ns)
            self._timeline.play()

    def _settle(self) -> None:
        if self.range_ns is None:
            self._clock.stop()
        elif not self._clock.isActive():  # a bound that is dragged does not put off the look
            self._clock.start()
        self.changed.emit()

    def _look(self) -> None:
        """Away from the live end, what is beyond the end goes back to the begin; so does what stands at the end."""
        timeline, around = self._timeline, self.range_ns
        if around is None or timeline.is_live:
            return
        is_over = timeline.is_at_end and timeline.cursor_ns >= around[1] - SHORTEST_NS
        if timeline.is_playing and (timeline.cursor_ns >= around[1] or is_over):
            timeline.go_to(around[0])
            if is_over:
                timeline.play()
