"""Two synchronized sessions with one timeline, which has the same interface as that of a session.

Owns the cursor on A's clock, the alignment of B, and the bookmarks of both on A's clock. Each session plays by itself;
the one that is ahead waits. A run that was not recorded at a time shows its nearest moment. Knows no widgets.
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

_AHEAD_S: Final = 0.1
"""Lead over the other run, in seconds of playback, above which a run waits."""
_SAME_TIME_S: Final = 0.02
_SAME_NS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class PairSide:
    """One of the two runs, with its times converted to A's clock."""

    session: Session
    offset_ns: int

    @property
    def range_ns(self) -> tuple[int, int]:
        """First and last recorded time."""
        around = self.session.timeline.range_ns
        assert around is not None, "a recording has a range"
        return around[0] - self.offset_ns, around[1] - self.offset_ns

    @property
    def cursor_ns(self) -> int:
        return self.session.timeline.cursor_ns - self.offset_ns

    def contains(self, time_ns: int) -> bool:
        """Whether the run was recorded at that time."""
        first, last = self.range_ns
        return first <= time_ns <= last

    def continues_at(self, time_ns: int) -> bool:
        """Whether the run continues after that time."""
        first, last = self.range_ns
        return first <= time_ns < last

    def go_to(self, time_ns: int) -> None:
        """Move to that time, or to the nearest recorded one."""
        if abs(self.cursor_ns - time_ns) > _SAME_NS:
            self.session.timeline.go_to(time_ns + self.offset_ns)


class SessionPair(QObject):
    """Timeline of `a` and `b`, which play recordings. The caller closes both.

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
        self._stepping: PairSide | None = None
        self._event_side: PairSide | None = None
        """Side whose event is shown."""
        self._clock = QTimer(self, interval=FRAME_MS)
        self._clock.timeout.connect(self._advance)
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
    def have_one_clock(self) -> bool:
        """Whether the two runs overlap in wall-clock time."""
        a, b = PairSide(self.a, 0).range_ns, PairSide(self.b, 0).range_ns
        return a[0] <= b[1] and b[0] <= a[1]

    def align(self, alignment: Alignment, at_ns: int | None = None) -> None:
        """Set the alignment, then move to `at_ns`; None: stay at A's time."""
        self.alignment = alignment
        self.pause()
        self.go_to(self._position_ns if at_ns is None else at_ns)
        self.aligned.emit()

    # Cursor, on A's clock

    @property
    def range_ns(self) -> tuple[int, int]:
        """Time range that covers both runs, on A's clock."""
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
        """Always False, because there is no live end."""
        return False

    @property
    def is_live(self) -> bool:
        """Always False, because there is no live end."""
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
            self._stepping = None
            self._clock.start()
            self._advance()

    def pause(self) -> None:
        self._clock.stop()
        self._is_playing = False
        for side in self.sides:
            side.session.timeline.pause()
        self._gather()

    def go_to(self, time_ns: int) -> None:
        """Move both runs to this time. A run that was not recorded then shows its nearest moment."""
        first, last = self.range_ns
        self._position_ns = max(first, min(time_ns, last))
        self._stepping = self._event_side = None
        self._gather()

    def go_live(self) -> None:
        self.go_to(self.range_ns[1])

    def jump_by(self, seconds: float) -> None:
        self.go_to(self._position_ns + round(seconds * 1e9))

    def step_frames(self, num_frames: int) -> None:
        """Move by this many frames of A, or of B if A was not recorded at the cursor. The other run follows."""
        self.pause()
        lead = next((side for side in self.sides if side.contains(self._position_ns)), self.sides[0])
        self._stepping, self._event_side = lead, None
        lead.session.timeline.step_frames(num_frames)

    def go_to_event(self, kinds: Collection[str] | None, *, forward: bool) -> TimedEvent | None:
        """Show the next or previous event of `kinds` in either run and return it. The other run follows.

        Candidates are compared by their time on A's clock.
        """
        found = []
        for side in self.sides:
            timeline, events = side.session.timeline, side.session.overview.events
            timed = events.neighbor(timeline.shown_event, timeline.cursor_ns, kinds, forward=forward)
            if timed is not None:
                found.append((side, timed))
        if not found:
            return None
        lead, timed = (min if forward else max)(found, key=lambda each: each[1].time_ns - each[0].offset_ns)
        self._show(lead, timed, before=False)
        return timed

    @property
    def is_before_event(self) -> bool:
        return self._event_side is not None and self._event_side.session.timeline.is_before_event

    def switch_event_side(self) -> TimedEvent | None:
        lead = self._event_side
        timed = None if lead is None else lead.session.timeline.shown_event
        if lead is not None and timed is not None:
            self._show(lead, timed, before=not lead.session.timeline.is_before_event)
        return timed

    def _show(self, lead: PairSide, timed: TimedEvent, *, before: bool) -> None:
        self.pause()
        self.go_to(timed.time_ns - lead.offset_ns)
        self._stepping = self._event_side = lead  # the other run follows once this one has reached its frame
        lead.session.timeline.show_event(timed, before=before)

    # private

    def _gather(self) -> None:
        for side in self.sides:
            first, last = side.range_ns
            side.go_to(max(first, min(self._position_ns, last)))
        self.cursor_changed.emit()

    def _advance(self) -> None:
        """Advance the cursor to the slower run during playback, and pause or resume the faster one."""
        going = [side for side in self.sides if side.continues_at(max(self._position_ns, side.cursor_ns))]
        going = [side for side in going if side.range_ns[0] <= self._position_ns]
        if not going:
            self._position_ns = self.range_ns[1]
            self.pause()
            return
        self._position_ns = max(self._position_ns, min(side.cursor_ns for side in going))
        for side in going:
            ahead_s = (side.cursor_ns - self._position_ns) / 1e9
            if side.session.timeline.is_playing and ahead_s > _AHEAD_S * self._speed:
                side.session.timeline.pause()
            elif not side.session.timeline.is_playing and ahead_s <= _SAME_TIME_S * self._speed:
                side.session.timeline.play()
        self.cursor_changed.emit()

    def _on_jumped(self) -> None:
        """Let the other run follow after the leading run reached the frame of a step or event."""
        lead = self._stepping
        if lead is not None and lead.session.timeline is self.sender():
            self._position_ns = lead.cursor_ns
            self._gather()


class PairBookmarks(QObject):
    """Bookmarks and alarms of both runs on A's clock, each prefixed with its letter. Read-only."""

    changed = Signal()

    def __init__(self, pair: SessionPair) -> None:
        super().__init__(pair)
        self._pair = pair
        for session in (pair.a, pair.b):
            session.bookmarks.changed.connect(self.changed)
        pair.aligned.connect(self.changed)

    @property
    def shown(self) -> list[Bookmark]:
        found = [
            replace(
                bookmark,
                time_ns=bookmark.time_ns - side.offset_ns,
                until_ns=bookmark.until_ns and bookmark.until_ns - side.offset_ns,
                text=f"{letter}: {bookmark.text}" if bookmark.text else letter,
            )
            for letter, side in zip("AB", self._pair.sides, strict=True)
            for bookmark in side.session.bookmarks.shown
        ]
        return sorted(found, key=lambda bookmark: bookmark.time_ns)
