"""One timeline with a cursor, the state there, and what the person selected. The views' only door to the data.

Takes the sources' updates once a display frame on the GUI thread, applies them to mirror and history, and tells the
views. Knows no widget.

LIVE: the cursor is glued to the end, the views show the mirror that follows. PAUSED: the cursor stands, at once, at
what is shown, and everything that comes is still taken, applied and kept. Who moves the cursor leaves for a mirror of
its own, made from what was kept on the disk (`KeptTimeline`); where nothing is kept, pausing is a frozen copy and going
on shows the present. PLAYBACK is the same on a recording, which has no end that goes on.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from PySide6.QtCore import QObject, Qt, QTimer, Signal

from kvscope_app.session.cursor import Cursor
from kvscope_app.session.history import History
from kvscope_app.session.kept.bookmarks import Bookmarks
from kvscope_app.session.kept.own_handle import OwnHandle
from kvscope_app.session.links import Player, link_of, player_of
from kvscope_app.session.loop import Loop
from kvscope_app.session.viewpoint import Viewpoint
from kvscope_telemetry.errors import EngineDead
from kvscope_telemetry.messages.commands import Command
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.source import Source, SourceStatus, Update
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.summaries.course import Course

if TYPE_CHECKING:
    from kvscope_app.session.course_reading import CourseReading
    from kvscope_app.session.kept.kept_timeline import KeptTimeline
    from kvscope_app.session.kept.recorded_texts import RecordedTexts
    from kvscope_app.session.kept.recorder import Recorder
    from kvscope_app.session.texts.session_texts import SessionTexts

FRAME_MS: Final = 16
WAITING_MS: Final = 100
"""How often is looked while nothing comes but signs of life, and requests are under way."""
IDLE_MS: Final = 250
"""The same while there are none: nobody sees that the first frame came so much later."""
_BUSY_FOR_NS: Final = 1_000_000_000
STATUS_EVERY_NS: Final = 250_000_000
"""How often is told how things stand; at rest with each new second, for what shows one."""
_AT_END_NS: Final = 50_000_000
"""Who goes so close to the present is live."""
_CAUGHT_UP_NS: Final = 2_500_000_000
"""What is on the disk is that much behind at most: who plays fast and is there has caught up."""


class Session(QObject):
    """Owns `source`, the mirrors and the cursor. Signals are emitted on the GUI thread."""

    updated = Signal(object)
    """An `Update` of the source was applied (also while paused)."""
    shown = Signal(object)
    """An `Update` was applied to what is shown."""
    status_changed = Signal()
    selection_changed = Signal()
    paused_changed = Signal()
    cursor_changed = Signal()
    """What is shown is another moment than before, or its past is known better."""
    course_changed = Signal()
    noticed = Signal(str)
    """Something a person should read, in a sentence."""
    replies = Signal(list)
    """`Reply` objects that came; each reader picks its own by request id or tag."""

    def __init__(self, source: Source, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.source = source
        self.course = Course()
        """Seconds and events of the whole timeline; it grows. For the GUI thread."""
        self.bookmarks = Bookmarks(self)
        self.bookmarks.failed.connect(self.noticed)
        self.loop = Loop(self, self)
        self.kept: KeptTimeline | None = None
        self._texts: SessionTexts | None = None
        self._recorded_texts: RecordedTexts | None = None
        self._link = link_of(source)
        player = player_of(source)
        other_end = self._link or player
        self._end = Viewpoint(source, self.course, player, None if other_end is None else other_end.resync)
        self._cursor = Cursor(self.course)
        self.is_file = player is not None
        """Whether there is no end that goes on: a recording is played."""
        self._reading: CourseReading | None = None
        self.status: SourceStatus = source.status
        self.selected_request: int | None = None
        self.selected_block: int | None = None
        """A row of the ledger shown."""
        self.selected_blocks: npt.NDArray[np.uint32] | None = None
        """Rows of the ledger that stand out instead of a request's."""
        self.selected_batch: tuple[int, ...] = ()
        """Requests that stand out together instead of one: those of a step."""
        self._frozen: Mirror | None = None
        self._is_away = False
        self._paused_at_ns = 0
        self._status_told_ns = 0
        self._busy_ns = 0
        self._speed = 1.0
        self._told_failure = ""
        self._shown_epoch: int | None = None
        self._wall_offset_ns = self._end.history.wall_ns(0)
        self._timer = QTimer(self, timerType=Qt.TimerType.PreciseTimer, interval=FRAME_MS)
        self._timer.timeout.connect(self.poll)
        if player is not None:
            self._read_course(player)

    def start(self) -> None:
        """Begin to take updates."""
        self._timer.start()

    def keep(self, kept: KeptTimeline) -> None:
        """From now on `kept` is what there is to go back to. It is ours to end."""
        self.kept = kept
        self.bookmarks.keep = kept.mark

    def close(self) -> None:
        """Stop, close the source and delete what was kept; idempotent."""
        self._timer.stop()
        self._cursor.close(wait=True)
        if self._reading is not None:
            self._reading.close()
        if self._texts is not None:
            self._texts.close()
        if self._recorded_texts is not None:
            self._recorded_texts.close()
        kept, self.kept = self.kept, None
        self.source.close()
        if kept is not None:
            kept.close()

    # What is shown

    @property
    def mirror(self) -> Mirror:
        """The state to show: as it is, as it was when paused, or as it was at the cursor."""
        if self._cursor.point is not None and self._cursor.point.has_state:
            return self._cursor.point.mirror
        return self._end.mirror if self._frozen is None else self._frozen

    @property
    def live_mirror(self) -> Mirror:
        """The state at the source, wherever the cursor is."""
        return self._end.mirror

    @property
    def history(self) -> History:
        """What was lately at what is shown."""
        point = self._cursor.point
        return point.history if point is not None and point.has_state else self._end.history

    @property
    def live_history(self) -> History:
        """What was lately at the source."""
        return self._end.history

    @property
    def player(self) -> Player | None:
        """Who moves what is shown in time: None at the end, and where a pause has not been left yet."""
        return self._end.player if self.is_file else self._cursor.player

    @property
    def paused(self) -> bool:
        """Whether a live session's cursor is not at the end."""
        return self._is_away

    @property
    def shown_until_ns(self) -> int:
        """Our monotonic time of what is shown."""
        if self.player is not None:
            return self.player.now_ns
        if self._cursor.wanted_ns is not None:
            return self._cursor.wanted_ns - self._wall_offset_ns
        return self._paused_at_ns if self._is_away else time.monotonic_ns()

    @property
    def cursor_ns(self) -> int:
        """The same by the wall clock, in nanoseconds since 1970: the clock of `course.time_ns`."""
        player = self.player
        if player is not None:
            return player.recording.start_ns + round(player.position * 1e9)
        return self.shown_until_ns + self._wall_offset_ns

    @property
    def behind_seconds(self) -> float:
        """How far what is shown lies behind the present; 0 where there is none."""
        return max(0.0, (time.monotonic_ns() - self.shown_until_ns) / 1e9) if self._is_away else 0.0

    @property
    def timeline_range_ns(self) -> tuple[int, int] | None:
        """First and last moment there is to go to, by the wall clock; None while there is none."""
        player = self._end.player
        if player is not None:
            recording = player.recording
            start_ns = recording.start_ns
            return start_ns + round(recording.first_s * 1e9), start_ns + round(player.duration * 1e9)
        kept = None if self.kept is None or self._end.mirror.hello is None else self.kept.range_ns
        if kept is None:
            return None
        return kept[0], max(kept[1], time.monotonic_ns() + self._wall_offset_ns)

    @property
    def origin_ns(self) -> int | None:
        """Where positions of the timeline count from, by the wall clock; it does not move."""
        if self._end.player is not None:
            return self._end.player.recording.start_ns
        return None if self.kept is None else self.kept.ring.origin_ns

    @property
    def course_share(self) -> float | None:
        """How much of the course of a recording without one is computed, 0 to 1; None when there is nothing to do."""
        reading = self._reading
        return reading.share if reading is not None and reading.is_computing else None

    @property
    def is_course_whole(self) -> bool:
        """Whether nothing of a recording's course is still to be read."""
        return self._reading is None

    @property
    def recorder(self) -> Recorder | None:
        """The recording that runs."""
        return None if self.kept is None else self.kept.recorder

    @property
    def recorded_texts(self) -> RecordedTexts | None:
        """What blocks held, as the recording or the kept past tells it; None where there is nothing that could."""
        if self._recorded_texts is None and (self.is_file or (self.kept is not None and self.kept.has_texts)):
            from kvscope_app.session.kept.recorded_texts import recorded_texts  # most windows need none of it

            self._recorded_texts = recorded_texts(self._end.player, self.kept)
        return self._recorded_texts

    @property
    def texts(self) -> SessionTexts:
        """What blocks hold as text at the time that is shown, as the engine or a recording tells it."""
        if self._texts is None:
            from kvscope_app.session.texts.session_texts import SessionTexts

            self._texts = SessionTexts(self, self)
        return self._texts

    # Moving in time

    @property
    def is_playing(self) -> bool:
        """Whether what is shown goes on: at the end it does."""
        if self.player is not None:
            return self.player.is_playing
        return self._cursor.wants_play if self._is_away else True

    @property
    def speed(self) -> float:
        """Recorded seconds a second, away from the live end."""
        return self._speed

    def set_speed(self, factor: float) -> None:
        """Play so many times as fast. Raises BadInput for what is not accepted."""
        if self.player is not None:
            self.player.set_speed(factor)
        self._speed = factor

    def set_paused(self, paused: bool) -> None:
        """Stand still here, or be live again."""
        if paused:
            self.pause()
        else:
            self.go_live()

    def pause(self) -> None:
        """Stand still here and now; what comes is still taken in."""
        if self.player is not None:
            self.player.pause()
        elif self._is_away:
            self._cursor.wants_play = False
        elif not self.is_file:
            self._frozen = copy.deepcopy(self._end.mirror)
            self._paused_at_ns = time.monotonic_ns()
            self._is_away = True
            self.paused_changed.emit()

    def play(self) -> None:
        """Go on from here. Never jumps: where nothing is kept in between, the present is what comes next."""
        self._keep_pace(is_busy=True)
        player = self.player
        if player is not None:
            if not player.is_at_end:
                player.play()
            elif not self.is_file:
                self.go_live()
        elif self._is_away and self.timeline_range_ns is None:
            self.go_live()
        elif self._is_away:
            self._cursor.wants_play = True
            self._leave(self.cursor_ns)

    def go_live(self) -> None:
        """Glue the cursor to the end again; of a recording, go to its end."""
        self._keep_pace(is_busy=True)
        if self._end.player is not None:
            self._end.player.seek(self._end.player.duration, with_past=False)
        if not self._is_away:
            return
        self._cursor.close()
        self._frozen, self._is_away = None, False
        self._follow_epoch()
        self.paused_changed.emit()
        self.cursor_changed.emit()

    def go_to(self, time_ns: int) -> None:
        """Move the cursor to `time_ns`, by the wall clock; beyond the end a live session is live."""
        around = self.timeline_range_ns
        if around is None:
            return
        if self._end.player is not None:
            self._end.player.seek((time_ns - self._end.player.recording.start_ns) / 1e9, with_past=False)
        elif time_ns >= around[1] - _AT_END_NS:
            self.go_live()
        else:
            if not self._is_away:
                self.pause()
            self._leave(max(time_ns, around[0]))
        self._keep_pace(is_busy=True)

    def jump_by(self, seconds: float) -> None:
        """Forward, or back with a negative number."""
        if seconds < 0 or self._is_away or self.is_file:
            self.go_to(self.cursor_ns + round(seconds * 1e9))

    def step_frames(self, num_frames: int) -> None:
        """Stand still so many frames of the engine further, or back."""
        if self.timeline_range_ns is None:
            return
        if not self.is_file and not self._is_away:
            self.pause()
        if self.player is not None:
            self.player.step(num_frames)
        else:
            shown = self._cursor.wanted_seq or self.mirror.seq
            self._leave(self.cursor_ns)
            self._cursor.wanted_seq = max(shown + num_frames, 0)
        self._keep_pace(is_busy=True)

    def go_to_event(self, kinds: Collection[str] | None, *, forward: bool) -> bool:
        """To the next event of `kinds` (None: of any), or the one before; whether there is one."""
        events, at_ns = self.course.events, self.cursor_ns
        found = events.find(at_ns + 1, None, kinds)[:1] if forward else events.find(None, at_ns - 1, kinds)[-1:]
        if not found.size:
            return False
        self.go_to(events[int(found[0])].time_ns)
        return True

    # Selection and commands

    def select_request(self, number: int | None) -> None:
        """Select a request in every view, or nothing."""
        if number == self.selected_request and self.selected_blocks is None and not self.selected_batch:
            return
        self.selected_request, self.selected_blocks, self.selected_batch = number, None, ()
        self.selection_changed.emit()

    def select_batch(self, numbers: tuple[int, ...]) -> None:
        """Let the requests of a step stand out in every view, instead of one."""
        if numbers != self.selected_batch:
            self.selected_request, self.selected_blocks, self.selected_batch = None, None, numbers
            self.selection_changed.emit()

    def select_block(self, block: int | None) -> None:
        """Select a row of the ledger in every view, or nothing."""
        if block == self.selected_block:
            return
        self.selected_block = block
        self.selection_changed.emit()

    def clear_selection(self) -> None:
        """Nothing is selected any more."""
        self.select_block(None)
        self.select_request(None)

    def own_handle(self) -> OwnHandle | None:
        """On what was recorded, for a thread of one's own; None where nothing is."""
        player = self._end.player
        if player is not None:
            recording = player.recording
            open_it = partial(type(recording).open, recording.path)  # type: ignore[attr-defined]
            return OwnHandle(lambda watch: open_it(watch=watch), lambda: None)
        return None if self.kept is None else OwnHandle(self.kept.read_tape, self.kept.ring.flush)

    @property
    def takes_commands(self) -> bool:
        """Whether the other end can be asked and told things."""
        return self._link is not None

    @property
    def is_viewer(self) -> bool:
        """Whether the engine lets us see and do nothing else."""
        return self.status.role == Role.VIEWER

    @property
    def may_operate(self) -> bool:
        """Whether the other end does what it is told."""
        return self.takes_commands and not self.is_viewer

    def send(self, command: Command) -> bool:
        """Send to the engine; False when there is none that could take it. Never blocks.

        Raises BadInput for a command that is too large.
        """
        if self._link is None:
            return False
        self._keep_pace(is_busy=True)
        try:
            self._link.send(command)
        except EngineDead:
            return False
        return True

    def select_blocks(self, rows: npt.NDArray[np.uint32]) -> None:
        """Let these rows of the ledger stand out in every view, instead of a request's."""
        if self.selected_blocks is not None and np.array_equal(rows, self.selected_blocks):
            return
        self.selected_request, self.selected_blocks, self.selected_batch = None, rows, ()
        self.selection_changed.emit()

    def poll(self) -> None:
        """Take what came, apply it, and tell. Called by the timer each display frame."""
        is_busy = self._take(self._end)
        if self._is_away:
            is_busy = self._look_after_cursor() or is_busy
        if self._link is not None and (replies := self._link.take_replies()):
            is_busy = True
            self.replies.emit(replies)
        self._keep_pace(is_busy)
        self._tell_status()

    # private

    def _take(self, point: Viewpoint) -> bool:
        """Apply what `point` has; whether anything happens there."""
        player = point.player
        is_busy = player is not None and player.is_playing
        update = point.source.take()
        while update is not None:
            is_busy = is_busy or not update.is_sign_of_life
            has_jumped = player is not None and player.has_jumped
            if point.apply(update):
                self._tell(point, update, has_jumped=has_jumped)
            update = None if player is None else point.source.take()  # a recording gives short spans
        return is_busy

    def _tell(self, point: Viewpoint, update: Update, *, has_jumped: bool) -> None:
        if point is self._end:
            self.updated.emit(update)
        if point is self._cursor.point or not self._is_away:
            self._follow_epoch()
            self.shown.emit(update)
            if has_jumped:
                self.cursor_changed.emit()

    def _follow_epoch(self) -> None:
        """Numbers of requests start again with an epoch."""
        epoch = self.mirror.epoch
        if epoch != self._shown_epoch:
            self._shown_epoch = epoch
            self.select_request(None)
            self.select_block(None)

    def _leave(self, time_ns: int) -> None:
        """Show `time_ns` on the cursor's mirror; it is made when there is none yet."""
        assert self.kept is not None, "nothing is kept to go to"
        self._cursor.go_to(time_ns, self.kept, self._speed)

    def _look_after_cursor(self) -> bool:
        failure = self._cursor.take_opened(self._speed)
        if failure:
            self.noticed.emit(f"What was kept cannot be read: {failure}")
        point, player = self._cursor.point, self._cursor.player
        if point is None or player is None:
            return self._cursor.is_opening
        is_busy = self._take(point)
        self._cursor.step_as_wanted()
        behind_ns = time.monotonic_ns() - player.now_ns
        if player.is_playing and player.speed > 1 and player.is_at_end and behind_ns < _CAUGHT_UP_NS:
            self.go_live()
        return is_busy or self._cursor.is_seeking

    def _keep_pace(self, is_busy: bool) -> None:
        """Look at every display frame while something happens, and for a second after."""
        now_ns = time.monotonic_ns()
        if is_busy:
            self._busy_ns = now_ns
        wanted_ms = FRAME_MS if now_ns - self._busy_ns < _BUSY_FOR_NS else self._calm_ms
        if wanted_ms != self._timer.interval():
            self._timer.setInterval(wanted_ms)

    @property
    def _calm_ms(self) -> int:
        counters = self._end.mirror.counters
        return WAITING_MS if counters.num_running + counters.num_waiting else IDLE_MS

    def _tell_status(self) -> None:
        status = self.source.status
        now_ns = time.monotonic_ns()
        if self._is_status_due(status, now_ns):
            self.status = status
            self._status_told_ns = now_ns
            self._extend_course()
            self.status_changed.emit()

    def _is_status_due(self, status: SourceStatus, now_ns: int) -> bool:
        before, told_ns = self.status, self._status_told_ns
        if (status.state, status.role) != (before.state, before.role):
            return True
        if now_ns - told_ns < STATUS_EVERY_NS:
            return False
        is_at_rest = self._timer.interval() != FRAME_MS and status.reason == before.reason
        return not is_at_rest or self._second(now_ns) != self._second(told_ns)

    def _second(self, time_ns: int) -> int:
        """By the wall clock."""
        return (time_ns + self._wall_offset_ns) // 1_000_000_000

    def _extend_course(self) -> None:
        has_grown = self.kept is not None and self.kept.take_into(self.course)
        if self.kept is not None and self.kept.ring.start_ns is not None:
            self.bookmarks.forget_before(self.kept.ring.start_ns)
        reading = self._reading
        if reading is not None:
            has_grown = reading.take_into(self.course) or has_grown
            self.bookmarks.told(reading.take_bookmarks())
            if reading.is_over:
                self._reading = None
        if has_grown:
            if reading is not None:
                self._end.fill_past()
                self.cursor_changed.emit()
            self.course_changed.emit()
        if self.kept is not None:
            self._tell_failures(self.kept)

    def _tell_failures(self, kept: KeptTimeline) -> None:
        """In one notice: the same full disk may have ended both."""
        notices, recorder = [], kept.recorder
        if recorder is not None and recorder.failure:
            kept.stop_recording()
            notices.append(f"The recording ended: {recorder.failure}; {recorder.writer.left}")
        if kept.failure and not self._told_failure:
            self._told_failure = kept.failure
            notices.append(f"The past is not kept: {self._told_failure}")
        if notices:
            self.noticed.emit(". ".join(notices))

    def _read_course(self, player: Player) -> None:
        from kvscope_app.session.course_reading import CourseReading  # a live session has its own

        self._reading = CourseReading(player.recording)
        self.bookmarks.keep = self._reading.keep_bookmarks
