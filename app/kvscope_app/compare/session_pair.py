"""Two synchronized sessions with a common timeline, which has the same interface as the timeline of one session.

Owns the cursor on A's clock, the alignment of B, and the bookmarks of both sessions with their times on A's clock. Each
session plays on its own timeline; the one that is ahead is paused until the other has caught up. Imports no widgets.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace
from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.session.poll_timer import FRAME_MS
from kvscope_app.session.session import Session
from kvscope_app.session.shared_zoom import SharedZoom
from kvscope_app.session.timeline import Loop
from kvscope_telemetry.exports.comparison.alignment import Alignment
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.summary import TimedEvent

_MAX_LEAD_S: Final = 0.1
"""Lead over the other run, in seconds of playback, above which the run that is ahead is paused."""
_RESUME_LEAD_S: Final = 0.02
"""Lead over the other run, in seconds of playback, up to which a paused run continues."""
_SEEK_TOLERANCE_NS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class PairSide:
    """One of the two runs, with its times converted to A's clock."""

    session: Session
    offset_ns: int

    @property
    def range_ns(self) -> tuple[int, int]:
        """First and last recorded time in ns, on A's clock."""
        range_ns = self.session.timeline.range_ns
        assert range_ns is not None, "a recording has a range"
        return range_ns[0] - self.offset_ns, range_ns[1] - self.offset_ns

    @property
    def cursor_ns(self) -> int:
        return self.session.timeline.cursor_ns - self.offset_ns

    def contains(self, time_ns: int) -> bool:
        first, last = self.range_ns
        return first <= time_ns <= last

    def continues_at(self, time_ns: int) -> bool:
        """Whether `time_ns` is within the recorded range and before its end."""
        first, last = self.range_ns
        return first <= time_ns < last

    def go_to(self, time_ns: int) -> None:
        if abs(self.cursor_ns - time_ns) > _SEEK_TOLERANCE_NS:
            self.session.timeline.go_to(time_ns + self.offset_ns)


class SessionPair(QObject):
    """Common timeline of sessions `a` and `b`, which play recordings. The caller closes the sessions.

    Implements `Timeline`, which documents members without docstring here.
    """

    paused_changed = Signal()
    cursor_changed = Signal()
    aligned = Signal()

    def __init__(self, a: Session, b: Session, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.a, self.b = a, b
        self.is_file = True
        self.alignment = Alignment()
        self._position_ns = 0
        self._is_playing = False
        self._speed = 1.0
        self._leading_side: PairSide | None = None
        self._event_side: PairSide | None = None
        self._advance_timer = QTimer(self, interval=FRAME_MS)
        self._advance_timer.timeout.connect(self._advance)
        for session in (a, b):
            session.timeline.cursor_changed.connect(self._on_jumped)
        self.bookmarks, self.loop = PairBookmarks(self), Loop(self, self)
        self.shared_zoom = SharedZoom(self)
        self.align(self.by_starts())

    # Alignment

    @property
    def sides(self) -> tuple[PairSide, PairSide]:
        return PairSide(self.a, 0), PairSide(self.b, self.alignment.offset_ns)

    def by_starts(self) -> Alignment:
        (a_first, _), (b_first, _) = PairSide(self.a, 0).range_ns, PairSide(self.b, 0).range_ns
        return Alignment.of(a_first, b_first)

    @property
    def has_time_overlap(self) -> bool:
        a, b = PairSide(self.a, 0).range_ns, PairSide(self.b, 0).range_ns
        return a[0] <= b[1] and b[0] <= a[1]

    def align(self, alignment: Alignment, at_ns: int | None = None) -> None:
        """Set the alignment, then move to `at_ns` on A's clock, or stay at the current time if it is None."""
        self.alignment = alignment
        self.pause()
        self.go_to(self._position_ns if at_ns is None else at_ns)
        self.aligned.emit()

    # Cursor, on A's clock

    @property
    def range_ns(self) -> tuple[int, int]:
        """First and last time in ns recorded in either run, on A's clock."""
        (a_first, a_last), (b_first, b_last) = (side.range_ns for side in self.sides)
        return min(a_first, b_first), max(a_last, b_last)

    @property
    def origin_ns(self) -> int:
        return self.range_ns[0]

    @property
    def cursor_ns(self) -> int:
        return self._position_ns

    @property
    def is_paused(self) -> bool:
        """Always False, because only a live timeline can be paused (`Timeline.is_paused`), and both runs are
        recordings.
        """
        return False

    @property
    def is_live(self) -> bool:
        return False

    @property
    def is_playing(self) -> bool:
        return self._is_playing

    @property
    def is_at_end(self) -> bool:
        return self._position_ns >= self.range_ns[1]

    @property
    def speed(self) -> float:
        return self._speed

    def set_speed(self, factor: float) -> None:
        for side in self.sides:
            side.session.timeline.set_speed(factor)
        self._speed = factor

    def play(self) -> None:
        self._event_side = None
        if any(side.continues_at(self._position_ns) for side in self.sides):
            self._is_playing = True
            self._leading_side = None
            self._advance_timer.start()
            self._advance()

    def pause(self) -> None:
        self._advance_timer.stop()
        self._is_playing = False
        for side in self.sides:
            side.session.timeline.pause()
        self._move_sides()

    def go_to(self, time_ns: int) -> None:
        """Move both runs to this time. A run that was not recorded at that time shows its nearest moment."""
        first, last = self.range_ns
        self._position_ns = max(first, min(time_ns, last))
        self._leading_side = self._event_side = None
        self._move_sides()

    def go_live(self) -> None:
        self.go_to(self.range_ns[1])

    def jump_by(self, seconds: float) -> None:
        self.go_to(self._position_ns + round(seconds * 1e9))

    def step_frames(self, num_frames: int) -> None:
        """Move by `num_frames` frames of A, or of B if A was not recorded at the cursor. The other run follows."""
        self.pause()
        lead = next((side for side in self.sides if side.contains(self._position_ns)), self.sides[0])
        self._leading_side, self._event_side = lead, None
        lead.session.timeline.step_frames(num_frames)

    def go_to_event(self, kinds: Collection[str] | None, *, forward: bool) -> TimedEvent | None:
        """Show the next or previous event of `kinds` in either run and return it. The other run follows.

        Candidates are compared by their time on A's clock.
        """
        candidates = []
        for side in self.sides:
            timeline, events = side.session.timeline, side.session.overview.events
            timed = events.neighbor(timeline.shown_event, timeline.cursor_ns, kinds, forward=forward)
            if timed is not None:
                candidates.append((side, timed))
        if not candidates:
            return None
        lead, timed = (min if forward else max)(candidates, key=lambda each: each[1].time_ns - each[0].offset_ns)
        self._show_event(lead, timed, before=False)
        return timed

    @property
    def is_before_event(self) -> bool:
        return self._event_side is not None and self._event_side.session.timeline.is_before_event

    def switch_event_side(self) -> TimedEvent | None:
        lead = self._event_side
        timed = None if lead is None else lead.session.timeline.shown_event
        if lead is not None and timed is not None:
            self._show_event(lead, timed, before=not lead.session.timeline.is_before_event)
        return timed

    def _show_event(self, lead: PairSide, timed: TimedEvent, *, before: bool) -> None:
        self.pause()
        self.go_to(timed.time_ns - lead.offset_ns)
        self._leading_side = self._event_side = lead  # the other run follows once this one has reached its frame
        lead.session.timeline.show_event(timed, before=before)

    # private

    def _move_sides(self) -> None:
        for side in self.sides:
            first, last = side.range_ns
            side.go_to(max(first, min(self._position_ns, last)))
        self.cursor_changed.emit()

    def _advance(self) -> None:
        """Move the cursor to the time of the slower run during playback, and pause or resume the faster one."""
        playable = [side for side in self.sides if side.continues_at(max(self._position_ns, side.cursor_ns))]
        playable = [side for side in playable if side.range_ns[0] <= self._position_ns]
        if not playable:
            self._position_ns = self.range_ns[1]
            self.pause()
            return
        self._position_ns = max(self._position_ns, min(side.cursor_ns for side in playable))
        for side in playable:
            ahead_s = (side.cursor_ns - self._position_ns) / 1e9
            if side.session.timeline.is_playing and ahead_s > _MAX_LEAD_S * self._speed:
                side.session.timeline.pause()
            elif not side.session.timeline.is_playing and ahead_s <= _RESUME_LEAD_S * self._speed:
                side.session.timeline.play()
        self.cursor_changed.emit()

    def _on_jumped(self) -> None:
        """Move the other run to the same time, once the leading run has reached the frame of a step or event."""
        lead = self._leading_side
        if lead is not None and lead.session.timeline is self.sender():
            self._position_ns = lead.cursor_ns
            self._move_sides()


class PairBookmarks(QObject):
    """Bookmarks and alarms of both runs on A's clock, with texts prefixed by the letter of their run. Read-only."""

    changed = Signal()

    def __init__(self, pair: SessionPair) -> None:
        super().__init__(pair)
        self._pair = pair
        for session in (pair.a, pair.b):
            session.bookmarks.changed.connect(self.changed)
        pair.aligned.connect(self.changed)

    @property
    def shown(self) -> list[Bookmark]:
        bookmarks = [
            replace(
                bookmark,
                time_ns=bookmark.time_ns - side.offset_ns,
                until_ns=bookmark.until_ns and bookmark.until_ns - side.offset_ns,
                text=f"{letter}: {bookmark.text}" if bookmark.text else letter,
            )
            for letter, side in zip("AB", self._pair.sides, strict=True)
            for bookmark in side.session.bookmarks.shown
        ]
        return sorted(bookmarks, key=lambda bookmark: bookmark.time_ns)
