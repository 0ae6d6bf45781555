"""Interface of a timeline: a time range with a cursor, and the operations that move the cursor.

A session has a timeline (`source_timeline.py`), for a live engine with its recorded history or for a recording. Two
compared sessions share one (`compare/session_pair.py`). The playback bar and the shortcuts use only this interface.
Also has `Loop`, a range that is played repeatedly.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Protocol

from PySide6.QtCore import QObject, QTimer, Signal, SignalInstance

from kvscope_app.session.shared_zoom import SharedZoom
from kvscope_telemetry.summaries.summary import TimedEvent

_POLL_INTERVAL_MS: Final = 30
SHORTEST_NS: Final = 20_000_000


class Timeline(Protocol):
    """Time range with a cursor.

    Times are nanoseconds since 1970 on the timeline's own clock. Signals have no arguments.
    """

    @property
    def paused_changed(self) -> SignalInstance:
        """Emitted when the cursor left the live end or returned to it."""

    @property
    def cursor_changed(self) -> SignalInstance:
        """Emitted when the shown time jumped, or when more of the history before it is known."""

    @property
    def is_file(self) -> bool:
        """Whether a recording is played, so that there is no live end."""

    @property
    def range_ns(self) -> tuple[int, int] | None:
        """First and last time that the cursor can move to; None if it cannot move."""

    @property
    def origin_ns(self) -> int | None:
        """Fixed time from which positions are counted; None if there is no history."""

    @property
    def cursor_ns(self) -> int: ...

    @property
    def is_paused(self) -> bool:
        """Whether the cursor is away from a live end."""

    @property
    def is_live(self) -> bool: ...

    @property
    def is_playing(self) -> bool:
        """Whether the shown state advances; always True at a live end."""

    @property
    def is_at_end(self) -> bool: ...

    @property
    def speed(self) -> float:
        """Recorded seconds that are played per second."""

    @property
    def shared_zoom(self) -> SharedZoom: ...

    @property
    def loop(self) -> Loop: ...

    @property
    def is_before_event(self) -> bool:
        """Whether the state before the shown event is shown, rather than the state after it."""

    def go_to(self, time_ns: int) -> None:
        """Move the cursor as close to `time_ns` as possible."""

    def go_live(self) -> None:
        """Move the cursor to the end."""

    def jump_by(self, seconds: float) -> None: ...

    def step_frames(self, num_frames: int) -> None:
        """Pause and move by `num_frames` engine frames, backward if negative."""

    def go_to_event(self, kinds: Collection[str] | None, *, forward: bool) -> TimedEvent | None:
        """Show the next event of `kinds` (None for any), or the previous one unless `forward`. Returns the event, or
        None.
        """

    def switch_event_side(self) -> TimedEvent | None:
        """Toggle between the states before and after the shown event. Returns the event, or None if no event
        is shown.
        """

    def pause(self) -> None:
        """Stop at the shown time. Updates of a live engine are still received."""

    def play(self) -> None: ...

    def set_speed(self, factor: float) -> None:
        """Set the playback speed. Raises BadInput for a speed that is not supported."""


class Loop(QObject):
    """Range of a timeline that is played repeatedly while both its ends are set.

    Owns the range and the timer that checks whether its end is reached.
    """

    changed = Signal()

    def __init__(self, timeline: Timeline, parent: QObject) -> None:
        super().__init__(parent)
        self._timeline = timeline
        self.begin_ns: int | None = None
        self.end_ns: int | None = None
        self._poll_timer = QTimer(self, interval=_POLL_INTERVAL_MS)
        self._poll_timer.timeout.connect(self._poll)

    @property
    def range_ns(self) -> tuple[int, int] | None:
        """Start and end of the loop; None until both are set."""
        if self.begin_ns is None or self.end_ns is None:
            return None
        return self.begin_ns, self.end_ns

    def set_begin(self, time_ns: int) -> None:
        """Set the start. Also clears the end if it is less than `SHORTEST_NS` later."""
        self.begin_ns = time_ns
        if self.end_ns is not None and self.end_ns < time_ns + SHORTEST_NS:
            self.end_ns = None
        self._update_timer()

    def set_end(self, time_ns: int) -> None:
        """Set the end. Also clears the start if it is less than `SHORTEST_NS` earlier."""
        self.end_ns = time_ns
        if self.begin_ns is not None and self.begin_ns > time_ns - SHORTEST_NS:
            self.begin_ns = None
        self._update_timer()

    def set_bound(self, time_ns: int, *, is_begin: bool) -> None:
        """Set the start or the end. Once both are set, play from the start."""
        (self.set_begin if is_begin else self.set_end)(time_ns)
        if self.range_ns is not None:
            self.play()

    def set_range(self, begin_ns: int, end_ns: int) -> None:
        """Set both ends, in any order, without playing. A range shorter than `SHORTEST_NS` only sets the start."""
        self.begin_ns, self.end_ns = min(begin_ns, end_ns), max(begin_ns, end_ns)
        if self.end_ns - self.begin_ns < SHORTEST_NS:
            self.end_ns = None
        self._update_timer()

    def clear(self) -> bool:
        """Remove the loop. Returns whether its start or end was set."""
        was_set = (self.begin_ns, self.end_ns) != (None, None)
        self.begin_ns = self.end_ns = None
        self._update_timer()
        return was_set

    def play(self) -> None:
        if self.begin_ns is not None:
            self._timeline.go_to(self.begin_ns)
            self._timeline.play()

    def _update_timer(self) -> None:
        if self.range_ns is None:
            self._poll_timer.stop()
        elif not self._poll_timer.isActive():  # restarting would delay the check while a bound is dragged
            self._poll_timer.start()
        self.changed.emit()

    def _poll(self) -> None:
        """Go back to the loop's start if the cursor passed its end or stopped at the timeline's end."""
        timeline, range_ns = self._timeline, self.range_ns
        if range_ns is None or timeline.is_live:
            return
        has_ended = timeline.is_at_end and timeline.cursor_ns >= range_ns[1] - SHORTEST_NS
        if timeline.is_playing and (timeline.cursor_ns >= range_ns[1] or has_ended):
            timeline.go_to(range_ns[0])
            if has_ended:
                timeline.play()
