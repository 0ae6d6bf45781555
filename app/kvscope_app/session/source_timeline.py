"""The timeline of one source and the cursor on it: what is shown, and how a person moves that in time.

LIVE: the cursor is glued to the end, the views show the mirror that follows. PAUSED: the cursor stands, at once, at
what is shown, and everything that comes is still taken, applied and kept. Who moves the cursor leaves for a mirror of
its own, made from what was kept on the disk (`KeptTimeline`); where nothing is kept, pausing is a frozen copy and going
on shows the present. PLAYBACK is the same on a recording, which has no end that goes on.

Owns both viewpoints, the cursor and the loop. Is given the overview and what is kept. Must not know what is selected.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace
from PySide6.QtCore import QObject, Signal

from kvscope_app.session.background import Background
from kvscope_app.session.history import History
from kvscope_app.session.links import Player, player_of, resync_of
from kvscope_app.session.past import fill_past
from kvscope_app.session.timeline import Loop
from kvscope_app.session.visible_range import VisibleRange
from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.source import Source, Update
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import TimedEvent

if TYPE_CHECKING:
    from kvscope_app.session.kept.kept_timeline import KeptTimeline
    from kvscope_telemetry.playback.playback_source import PlaybackSource
    from kvscope_telemetry.recordings.reader import Recording

_AT_END_NS: Final = 50_000_000
"""Who goes so close to the present is live."""
_CAUGHT_UP_NS: Final = 2_500_000_000
"""What is on the disk is that much behind at most: who plays fast and is there has caught up."""


class SourceTimeline(QObject):
    """A `Timeline`, and what of the past it shows. Signals are emitted on the GUI thread. Times are nanoseconds since
    1970, where not said otherwise."""

    updated = Signal(object)
    """An `Update` of the source was applied (also while paused)."""
    shown = Signal(object)
    """An `Update` was applied to what is shown."""
    epoch_changed = Signal()
    """What is shown is of another start of the engine than before: numbers of requests start again."""
    paused_changed = Signal()
    cursor_changed = Signal()
    moved = Signal()
    """Somebody went somewhere, played, paused or changed the speed; what is shown follows."""
    event_shown = Signal()
    """An event is shown, the other side of it, or none any more."""
    event_chosen = Signal(object)
    """Somebody went to a `TimedEvent`, even where there is nothing to go to."""
    failed = Signal(str)
    """Why what was kept cannot be read, in a sentence."""

    def __init__(self, source: Source, overview: SessionOverview, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._overview = overview
        self.kept: KeptTimeline | None = None
        """Recent history to go back to; None for a recording, and where nothing is kept."""
        player = player_of(source)
        self.end = Viewpoint(source, overview, player, resync_of(source))
        """The state at the source, wherever the cursor is."""
        self.cursor = Cursor(overview)
        self.loop = Loop(self, self)
        self.visible_range = VisibleRange(self)
        self.shown_event: TimedEvent | None = None
        """The event that a person went to; None once they go anywhere else."""
        self.is_before_event = False
        self.is_file = player is not None
        self._speed = 1.0
        self._shown_epoch: int | None = None
        self._wall_offset_ns = self.end.history.wall_ns(0)

    def close(self) -> None:
        """Let go of what is read of the past."""
        self.cursor.close(wait=True)
        self.kept = None

    # What is shown

    @property
    def mirror(self) -> Mirror:
        """The state to show: as it is, as it was when paused, or as it was at the cursor."""
        if self.cursor.reached is not None:
            return self.cursor.reached.mirror
        return self.end.mirror if self.cursor.frozen is None else self.cursor.frozen

    @property
    def history(self) -> History:
        """What was lately at what is shown."""
        return (self.cursor.reached or self.end).history

    @property
    def player(self) -> Player | None:
        """Who moves what is shown in time: None at the end, and where a pause has not been left yet."""
        return self.end.player if self.is_file else self.cursor.player

    @property
    def paused(self) -> bool:
        """Whether a live session's cursor is not at the end."""
        return self.cursor.is_away

    @property
    def is_live(self) -> bool:
        """Whether the cursor is at an end that goes on."""
        return not self.is_file and not self.cursor.is_away

    @property
    def shown_until_ns(self) -> int:
        """Our monotonic time of what is shown."""
        if self.player is not None:
            return self.player.now_ns
        if self.cursor.wanted_ns is not None:
            return self.cursor.wanted_ns - self._wall_offset_ns
        return self.cursor.stood_ns if self.cursor.is_away else time.monotonic_ns()

    @property
    def cursor_ns(self) -> int:
        """The same by the wall clock: the clock of the overview."""
        player = self.player
        if player is not None:
            return player.recording.start_ns + round(player.position * 1e9)
        return self.shown_until_ns + self._wall_offset_ns

    @property
    def behind_seconds(self) -> float:
        """How far what is shown lies behind the present; 0 where there is none."""
        return max(0.0, (time.monotonic_ns() - self.shown_until_ns) / 1e9) if self.cursor.is_away else 0.0

    @property
    def range_ns(self) -> tuple[int, int] | None:
        """First and last moment there is to go to; None while there is none."""
        player = self.end.player
        if player is not None:
            recording = player.recording
            start_ns = recording.start_ns
            return start_ns + round(recording.first_s * 1e9), start_ns + round(player.duration * 1e9)
        kept = None if self.kept is None or self.end.mirror.hello is None else self.kept.range_ns
        if kept is None:
            return None
        return kept[0], max(kept[1], time.monotonic_ns() + self._wall_offset_ns)

    @property
    def origin_ns(self) -> int | None:
        """Where positions of the timeline count from; it does not move."""
        if self.end.player is not None:
            return self.end.player.recording.start_ns
        return None if self.kept is None else self.kept.ring.origin_ns

    @property
    def is_at_end(self) -> bool:
        """Whether there is nothing more to play."""
        return self.player is not None and self.player.is_at_end

    # Moving in time

    @property
    def is_playing(self) -> bool:
        """Whether what is shown goes on: at the end it does."""
        if self.player is not None:
            return self.player.is_playing
        return self.cursor.wants_play if self.cursor.is_away else True

    @property
    def speed(self) -> float:
        """Recorded seconds a second, away from the live end."""
        return self._speed

    def set_speed(self, factor: float) -> None:
        """Play so many times as fast. Raises BadInput for what is not accepted."""
        if self.player is not None:
            self.player.set_speed(factor)
        self._speed = factor
        self.moved.emit()

    def pause(self) -> None:
        """Stand still here and now; what comes is still taken in."""
        if self.player is not None:
            self.player.pause()
        elif self.cursor.is_away:
            self.cursor.wants_play = False
        elif not self.is_file:
            self.cursor.stand(self.end.mirror)
            self.paused_changed.emit()
        self.moved.emit()

    def play(self) -> None:
        """Go on from here. Never jumps: where nothing is kept in between, the present is what comes next."""
        self._leave_event()
        player = self.player
        if player is not None:
            if not player.is_at_end:
                player.play()
            elif not self.is_file:
                self.go_live()
        elif self.cursor.is_away and self.range_ns is None:
            self.go_live()
        elif self.cursor.is_away:
            self.cursor.wants_play = True
            self._leave(self.cursor_ns)
        self.moved.emit()

    def go_live(self) -> None:
        """Move the cursor to the end. A live session follows the end from then on, and its zoom ends."""
        if not self.is_file:
            self.visible_range.show(None)
        self._leave_event()
        if self.end.player is not None:
            self.end.player.seek(self.end.player.duration, with_past=False)
        if self.cursor.is_away:
            self.cursor.come_back()
            self._follow_epoch()
            self.paused_changed.emit()
            self.cursor_changed.emit()
        self.moved.emit()

    def go_to(self, time_ns: int) -> None:
        """Move the cursor to `time_ns`; beyond the end a live session is live."""
        self._leave_event()
        around = self.range_ns
        if around is None:
            return
        if self.end.player is not None:
            self.end.player.seek((time_ns - self.end.player.recording.start_ns) / 1e9, with_past=False)
        elif time_ns >= around[1] - _AT_END_NS:
            self.go_live()
        else:
            if not self.cursor.is_away:
                self.pause()
            self._leave(max(time_ns, around[0]))
        self.moved.emit()

    def jump_by(self, seconds: float) -> None:
        """Forward, or back with a negative number."""
        if seconds < 0 or not self.is_live:
            self.go_to(self.cursor_ns + round(seconds * 1e9))

    def step_frames(self, num_frames: int) -> None:
        """Stand still so many frames of the engine further, or back."""
        if self.range_ns is None:
            return
        self._leave_event()
        if self.is_live:
            self.pause()
        if self.player is not None:
            self.player.step(num_frames)
        else:
            shown = self.cursor.wanted_seq or self.mirror.seq
            self._leave(self.cursor_ns)
            self.cursor.wanted_seq = max(shown + num_frames, 0)
        self.moved.emit()

    def go_to_event(self, kinds: Collection[str] | None, *, forward: bool) -> TimedEvent | None:
        """Show the next event of `kinds` (None: of any), or the one before; which that is."""
        timed = self._overview.events.neighbor(self.shown_event, self.cursor_ns, kinds, forward=forward)
        if timed is not None:
            self.show_event(timed)
        return timed

    def show_event(self, timed: TimedEvent, *, before: bool = False) -> None:
        """Stand still at the state after an event: the frame that tells it is applied. `before`: at the one before."""
        around = self.range_ns
        if around is not None:
            self.pause()
            self.shown_event, self.is_before_event = timed, before
            self._seek_event(timed, max(timed.time_ns, around[0]), before=before)
            self.event_shown.emit()
            self.moved.emit()
        self.event_chosen.emit(timed)

    def switch_event_side(self) -> TimedEvent | None:
        """Show the state before the event that is shown, and from there the one after it; None where none is."""
        if self.shown_event is not None:
            self.show_event(self.shown_event, before=not self.is_before_event)
        return self.shown_event

    # For who looks each display frame, and fills the overview

    def take_updates(self) -> bool:
        """Take what came, at the end and at the cursor, and apply it; whether anything happens there."""
        is_busy = self._take(self.end)
        if self.cursor.is_away:
            is_busy = self._look_after_cursor() or is_busy
        return is_busy

    # private

    def _seek_event(self, timed: TimedEvent, time_ns: int, *, before: bool) -> None:
        player = self.end.player
        if player is not None:
            player.seek_event((timed.time_ns - player.recording.start_ns) / 1e9, timed.event, before=before)
        else:
            assert self.kept is not None, "nothing is kept to go to"
            self.cursor.go_to(time_ns, self.kept, timed, before=before)

    def _leave_event(self) -> None:
        if self.shown_event is not None:
            self.shown_event, self.is_before_event = None, False
            self.event_shown.emit()

    def _take(self, point: Viewpoint) -> bool:
        """Apply what `point` has; whether anything happens there."""
        player = point.player
        is_busy = player is not None and player.is_playing
        update = point.source.take_update()
        while update is not None:
            is_busy = is_busy or not update.is_sign_of_life
            has_jumped = player is not None and player.has_jumped
            if point.apply(update):
                self._tell(point, update, has_jumped=has_jumped)
            update = None if player is None else point.source.take_update()  # a recording gives short spans
        return is_busy

    def _tell(self, point: Viewpoint, update: Update, *, has_jumped: bool) -> None:
        if point is self.end:
            self.updated.emit(update)
        if point is self.cursor.point or not self.cursor.is_away:
            self._follow_epoch()
            self.shown.emit(update)
            if has_jumped:
                self.cursor_changed.emit()

    def _follow_epoch(self) -> None:
        epoch = self.mirror.epoch
        if epoch != self._shown_epoch:
            self._shown_epoch = epoch
            self.epoch_changed.emit()

    def _leave(self, time_ns: int) -> None:
        """Show `time_ns` on the cursor's mirror; it is made when there is none yet."""
        assert self.kept is not None, "nothing is kept to go to"
        self.cursor.go_to(time_ns, self.kept)

    def _look_after_cursor(self) -> bool:
        failure = self.cursor.take_opened(self._speed) or self.cursor.take_failure()
        if failure:
            self.failed.emit(f"What was kept cannot be read: {failure}")
        point, player = self.cursor.point, self.cursor.player
        if point is None or player is None:
            return self.cursor.is_opening
        is_busy = self._take(point)
        self.cursor.step_as_wanted()
        behind_ns = time.monotonic_ns() - player.now_ns
        if player.is_playing and player.speed > 1 and player.is_at_end and behind_ns < _CAUGHT_UP_NS:
            self.go_live()
        return is_busy or self.cursor.is_seeking


class Viewpoint:
    """One place of a timeline: a source, the state rebuilt from it, and what happened there lately.

    A timeline has one at the end, and one at the cursor once somebody left the end. Owns `mirror` and `history`. With a
    `player` a jump begins both anew, and the past comes from `overview`.
    """

    def __init__(
        self,
        source: Source,
        overview: SessionOverview,
        player: Player | None = None,
        resync: Callable[[], None] | None = None,
    ) -> None:
        self.source = source
        self.player = player
        self.mirror = Mirror()
        self.history = History()
        self.has_state = False
        """Whether anything was applied."""
        self.failure = ""
        """Why the newest update that did not fit did not, until a snapshot made it good."""
        self._overview = overview
        self._resync = resync

    def apply(self, update: Update) -> bool:
        """Take in `update`, the source's newest; False when it did not fit: a snapshot makes it good."""
        has_jumped = self.player is not None and self.player.has_jumped
        if has_jumped:
            self.mirror = Mirror()  # what ended after this time has not ended yet
        try:
            self.mirror.apply(update)
        except ProtocolError as error:
            self.failure = str(error)
            if self._resync is not None:
                self._resync()
            return False
        if update.snapshot is not None:
            self.failure = ""
        if self.player is None:
            self.history.add_update(update, self.mirror, time.monotonic_ns())
        elif has_jumped:
            self.history.begin(update, self.mirror, self.player.now_ns)
            self.fill_past()
        else:
            self.history.add_update(update, self.mirror, self.player.taken_ns)
        self.has_state = True
        return True

    def fill_past(self) -> None:
        """The overview grew: what was before the last jump is known better."""
        if self.player is not None:
            recording = self.player.recording
            fill_past(self.history, self._overview, recording.start_ns + round(recording.first_s * 1e9))
            self._fill_stops()

    def _fill_stops(self) -> None:
        """Of what was before a jump, delta checkpoints do not tell when the engine stood still: the overview does."""
        hello, now_ns = self.mirror.hello, self.mirror.time_ns
        if hello is None:
            return
        for stop in self._overview.stops.shifted(hello.time_ns - hello.wall_time_ns):
            if hello.time_ns <= stop.begin_ns < now_ns:
                self.mirror.stops.add(stop if stop.end_ns <= now_ns else replace(stop, end_ns=0))


class Cursor:
    """The cursor of a live session away from its end: a frozen copy of what was shown, then what was kept, played.

    At the end; away from it between `stand` and `come_back`, on a ring recording of its own after `go_to`."""

    def __init__(self, overview: SessionOverview) -> None:
        self.is_away = False
        """Whether it is not at the end."""
        self.stood_ns = 0
        """Our monotonic time of when it left the end."""
        self.frozen: Mirror | None = None
        """What was shown then."""
        self.point: Viewpoint | None = None
        self.wanted_ns: int | None = None
        """Where it was told to go while the ring's recording opens, by the wall clock."""
        self._wanted_event: tuple[TimedEvent, bool] | None = None
        """The event that was there, and whether the state before it is wanted."""
        self.wants_play = False
        """Whether it is to go on from there."""
        self.wanted_seq: int | None = None
        """The frame to be at, told before the ring's recording was open."""
        self._overview = overview
        self._opening: Background[Recording] | None = None
        self._source: PlaybackSource | None = None

    @property
    def player(self) -> Player | None:
        """Once it is open."""
        return self._source

    @property
    def is_opening(self) -> bool:
        """Whether the ring's recording is being opened."""
        return self._opening is not None

    @property
    def is_seeking(self) -> bool:
        """Whether what there is to take is not yet of the position."""
        return self._source is not None and self._source.is_seeking

    @property
    def reached(self) -> Viewpoint | None:
        """The place on the ring's recording, once there is something to show of it."""
        return self.point if self.point is not None and self.point.has_state else None

    def stand(self, mirror: Mirror) -> None:
        """Leave the end: from now on a copy of `mirror`, as it is, is what is shown."""
        self.frozen = copy.deepcopy(mirror)
        self.stood_ns = time.monotonic_ns()
        self.is_away = True

    def come_back(self) -> None:
        """Be at the end again."""
        self.close()
        self.frozen, self.is_away = None, False

    def go_to(self, time_ns: int, kept: KeptTimeline, event: TimedEvent | None = None, *, before: bool = False) -> None:
        """Be at `time_ns`, by the wall clock; later, where the ring's recording must be opened first. With an `event`:
        at the frame that tells it, or `before` that."""
        self.wanted_seq = None
        self._wanted_event = None if event is None else (event, before)
        if self._source is not None:
            self._seek(self._source, time_ns)
            return
        self.wanted_ns = time_ns
        if self._opening is None:
            self._opening = Background(kept.open_recording, "kvscope-history")

    def take_opened(self, speed: float) -> str:
        """Once the ring's recording is open, go where it was told to; returns why it cannot be opened, else empty."""
        opening = self._opening
        if opening is None or not opening.is_over:
            return ""
        self._opening = None
        recording, time_ns = opening.made, self.wanted_ns
        self.wanted_ns = None
        if recording is None or time_ns is None:
            self.wants_play, self.wanted_seq = False, None
            return opening.failure
        from kvscope_telemetry.playback.playback_source import PlaybackSource  # who stays live needs none of it

        source = PlaybackSource(recording, is_playing=False)
        self._seek(source, time_ns)
        source.set_speed(speed)
        self._source = source
        self.point = Viewpoint(source, self._overview, source)
        if self.wants_play:
            source.play()
        self.wants_play = False
        return ""

    def _seek(self, source: PlaybackSource, time_ns: int) -> None:
        seconds, event = (time_ns - source.recording.start_ns) / 1e9, self._wanted_event
        if event is None:
            source.seek(seconds, with_past=False)
        else:
            source.seek_event(seconds, event[0].event, before=event[1])

    def take_failure(self) -> str:
        """Why the ring's recording cannot be read any further, once; else empty. What is shown stays; the next jump
        opens it anew."""
        source = self._source
        if source is None or not source.failure:
            return ""
        if self.reached is not None:
            self.stood_ns = source.taken_ns
        self._source = self.wanted_seq = None
        source.close()  # its thread has ended
        return source.failure

    def step_as_wanted(self) -> None:
        """Once there is a state, by as many frames as it is away from the one that was asked for."""
        if self.wanted_seq is not None and self.point is not None and self.point.has_state and self._source is not None:
            self._source.step(self.wanted_seq - self.point.mirror.seq)
            self.wanted_seq = None

    def close(self, *, wait: bool = False) -> None:
        """Let go of the ring's recording; `wait` until its thread ended."""
        opening, self._opening = self._opening, None
        source, self._source = self._source, None
        self.point = self.wanted_ns = None
        self.wants_play, self.wanted_seq = False, None
        if opening is not None:
            opening.cancel()
            if wait:
                opening.wait(2.0)
        if source is not None and wait:
            source.close()
        elif source is not None:
            threading.Thread(target=source.close, name="kvscope-let-go", daemon=True).start()
