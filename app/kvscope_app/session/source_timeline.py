"""Timeline of one source with a cursor: the shown state, and the operations that move the cursor.

- Live: the cursor follows the end, and views show the mirror that follows the source.
- Paused: the cursor stays at the shown time. Updates are still received, applied and recorded. Moving the cursor shows
  a second mirror, which is built from the recorded history on disk (`DiskHistory`). Without such history, pausing
  shows a frozen copy, and resuming returns to the present.
- Playback: the same for a recording, which has a fixed end.

Owns the viewpoint at the end, the viewpoint at the cursor, and the loop. The overview and the history on disk are
passed in. Does not depend on the selection.
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
from kvscope_app.session.history_backfill import backfill_history
from kvscope_app.session.links import Player, player_of, resync_of
from kvscope_app.session.shared_zoom import SharedZoom
from kvscope_app.session.timeline import Loop
from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.source import Source, Update
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import TimedEvent

if TYPE_CHECKING:
    from kvscope_app.session.recording.disk_history import DiskHistory
    from kvscope_telemetry.playback.playback_source import PlaybackSource
    from kvscope_telemetry.recordings.reader import Recording

_LIVE_DISTANCE_NS: Final = 50_000_000
"""Maximum distance in ns from the present at which a moved cursor becomes live."""
_MAX_HISTORY_DELAY_NS: Final = 2_500_000_000
"""Maximum delay in ns of the history on disk. Fast playback that reaches the history's end, at most this far behind the
present, becomes live.
"""


class SourceTimeline(QObject):
    """Implementation of `Timeline` for a source, and the history that it shows. `Timeline` documents most members.

    Signals are emitted on the GUI thread. Times are nanoseconds since 1970 unless noted otherwise.
    """

    updated = Signal(object)
    """Emitted with each `Update` of the source after it was applied, also while paused."""
    shown = Signal(object)
    """Emitted with each `Update` that was applied to the shown state."""
    epoch_changed = Signal()
    """Emitted when the shown state belongs to another engine start than before, so that request numbers start again."""
    paused_changed = Signal()
    cursor_changed = Signal()
    moved = Signal()
    """Emitted when the user moved the cursor, played, paused or changed the speed, before the shown state follows."""
    event_shown = Signal()
    """Emitted when `shown_event` or `is_before_event` has changed."""
    event_chosen = Signal(object)
    """Emitted with a `TimedEvent` that the user chose, even if there is no history to seek in."""
    failed = Signal(str)
    """Emitted with a sentence on why the history on disk cannot be read."""

    def __init__(self, source: Source, overview: SessionOverview, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._overview = overview
        self.disk_history: DiskHistory | None = None
        """Recorded history of a live source; None for a recording, and if nothing is recorded."""
        player = player_of(source)
        self.end = Viewpoint(source, overview, player, resync_of(source))
        """Viewpoint at the end of the source's data, independent of the cursor."""
        self.cursor = Cursor(overview)
        self.loop = Loop(self, self)
        self.shared_zoom = SharedZoom(self)
        self.shown_event: TimedEvent | None = None
        """Event that the user moved to; None after any other movement."""
        self.is_before_event = False
        self.is_file = player is not None
        self._speed = 1.0
        self._shown_epoch: int | None = None
        self._wall_offset_ns = self.end.history.wall_ns(0)

    def close(self) -> None:
        self.cursor.close(wait=True)
        self.disk_history = None

    # What is shown

    @property
    def mirror(self) -> Mirror:
        if self.cursor.ready_viewpoint is not None:
            return self.cursor.ready_viewpoint.mirror
        return self.end.mirror if self.cursor.frozen is None else self.cursor.frozen

    @property
    def history(self) -> History:
        return (self.cursor.ready_viewpoint or self.end).history

    @property
    def player(self) -> Player | None:
        """Player that moves the shown state in time; None at the live end, and while a pause shows a frozen copy."""
        return self.end.player if self.is_file else self.cursor.player

    @property
    def is_paused(self) -> bool:
        return self.cursor.is_away

    @property
    def is_live(self) -> bool:
        return not self.is_file and not self.cursor.is_away

    @property
    def shown_monotonic_ns(self) -> int:
        """Shown time on this machine's monotonic clock."""
        if self.player is not None:
            return self.player.now_ns
        if self.cursor.target_ns is not None:
            return self.cursor.target_ns - self._wall_offset_ns
        return self.cursor.frozen_ns if self.cursor.is_away else time.monotonic_ns()

    @property
    def cursor_ns(self) -> int:
        player = self.player
        if player is not None:
            return player.recording.start_ns + round(player.position * 1e9)
        return self.shown_monotonic_ns + self._wall_offset_ns

    @property
    def behind_seconds(self) -> float:
        """Seconds between the shown time and the present; 0 for a recording or at the live end."""
        return max(0.0, (time.monotonic_ns() - self.shown_monotonic_ns) / 1e9) if self.cursor.is_away else 0.0

    @property
    def range_ns(self) -> tuple[int, int] | None:
        player = self.end.player
        if player is not None:
            recording = player.recording
            start_ns = recording.start_ns
            return start_ns + round(recording.first_s * 1e9), start_ns + round(player.duration * 1e9)
        stored_range_ns = (
            None if self.disk_history is None or self.end.mirror.hello is None else self.disk_history.range_ns
        )
        if stored_range_ns is None:
            return None
        return stored_range_ns[0], max(stored_range_ns[1], time.monotonic_ns() + self._wall_offset_ns)

    @property
    def origin_ns(self) -> int | None:
        if self.end.player is not None:
            return self.end.player.recording.start_ns
        return None if self.disk_history is None else self.disk_history.ring.origin_ns

    @property
    def is_at_end(self) -> bool:
        return self.player is not None and self.player.is_at_end

    # Moving in time

    @property
    def is_playing(self) -> bool:
        if self.player is not None:
            return self.player.is_playing
        return self.cursor.plays_when_open if self.cursor.is_away else True

    @property
    def speed(self) -> float:
        return self._speed

    def set_speed(self, factor: float) -> None:
        if self.player is not None:
            self.player.set_speed(factor)
        self._speed = factor
        self.moved.emit()

    def pause(self) -> None:
        if self.player is not None:
            self.player.pause()
        elif self.cursor.is_away:
            self.cursor.plays_when_open = False
        elif not self.is_file:
            self.cursor.freeze(self.end.mirror)
            self.paused_changed.emit()
        self.moved.emit()

    def play(self) -> None:
        """Continue from the shown time, or from the present if nothing was recorded since then."""
        self._clear_shown_event()
        player = self.player
        if player is not None:
            if not player.is_at_end:
                player.play()
            elif not self.is_file:
                self.go_live()
        elif self.cursor.is_away and self.range_ns is None:
            self.go_live()
        elif self.cursor.is_away:
            self.cursor.plays_when_open = True
            self._seek_cursor(self.cursor_ns)
        self.moved.emit()

    def go_live(self) -> None:
        """Move the cursor to the end. A live session follows the end from then on, and its zoom is reset."""
        if not self.is_file:
            self.shared_zoom.show(None)
        self._clear_shown_event()
        if self.end.player is not None:
            self.end.player.seek(self.end.player.duration, with_past=False)
        if self.cursor.is_away:
            self.cursor.return_to_end()
            self._update_shown_epoch()
            self.paused_changed.emit()
            self.cursor_changed.emit()
        self.moved.emit()

    def go_to(self, time_ns: int) -> None:
        """Move the cursor to `time_ns`. A live session goes live if that is at or after the end."""
        self._clear_shown_event()
        range_ns = self.range_ns
        if range_ns is None:
            return
        if self.end.player is not None:
            self.end.player.seek((time_ns - self.end.player.recording.start_ns) / 1e9, with_past=False)
        elif time_ns >= range_ns[1] - _LIVE_DISTANCE_NS:
            self.go_live()
        else:
            if not self.cursor.is_away:
                self.pause()
            self._seek_cursor(max(time_ns, range_ns[0]))
        self.moved.emit()

    def jump_by(self, seconds: float) -> None:
        if seconds < 0 or not self.is_live:
            self.go_to(self.cursor_ns + round(seconds * 1e9))

    def step_frames(self, num_frames: int) -> None:
        if self.range_ns is None:
            return
        self._clear_shown_event()
        if self.is_live:
            self.pause()
        if self.player is not None:
            self.player.step(num_frames)
        else:
            shown_seq = self.cursor.target_seq or self.mirror.seq
            self._seek_cursor(self.cursor_ns)
            self.cursor.target_seq = max(shown_seq + num_frames, 0)
        self.moved.emit()

    def go_to_event(self, kinds: Collection[str] | None, *, forward: bool) -> TimedEvent | None:
        timed = self._overview.events.neighbor(self.shown_event, self.cursor_ns, kinds, forward=forward)
        if timed is not None:
            self.show_event(timed)
        return timed

    def show_event(self, timed: TimedEvent, *, before: bool = False) -> None:
        """Pause at the state after an event, or, if `before`, at the frame before the event."""
        range_ns = self.range_ns
        if range_ns is not None:
            self.pause()
            self.shown_event, self.is_before_event = timed, before
            self._seek_event(timed, max(timed.time_ns, range_ns[0]), before=before)
            self.event_shown.emit()
            self.moved.emit()
        self.event_chosen.emit(timed)

    def switch_event_side(self) -> TimedEvent | None:
        if self.shown_event is not None:
            self.show_event(self.shown_event, before=not self.is_before_event)
        return self.shown_event

    # Polling

    def apply_updates(self) -> bool:
        """Receive and apply updates at the end and at the cursor, once per poll. Returns whether there was activity."""
        is_busy = self._apply_pending(self.end)
        if self.cursor.is_away:
            is_busy = self._poll_cursor() or is_busy
        return is_busy

    # private

    def _seek_event(self, timed: TimedEvent, time_ns: int, *, before: bool) -> None:
        player = self.end.player
        if player is not None:
            player.seek_event((timed.time_ns - player.recording.start_ns) / 1e9, timed.event, before=before)
        else:
            assert self.disk_history is not None, "nothing is kept to go to"
            self.cursor.go_to(time_ns, self.disk_history, timed, before=before)

    def _clear_shown_event(self) -> None:
        if self.shown_event is not None:
            self.shown_event, self.is_before_event = None, False
            self.event_shown.emit()

    def _apply_pending(self, point: Viewpoint) -> bool:
        player = point.player
        is_busy = player is not None and player.is_playing
        update = point.source.poll_update()
        while update is not None:
            is_busy = is_busy or not update.is_sign_of_life
            has_jumped = player is not None and player.has_jumped
            if point.apply(update):
                self._emit_update(point, update, has_jumped=has_jumped)
            update = None if player is None else point.source.poll_update()  # a recording yields short updates
        return is_busy

    def _emit_update(self, point: Viewpoint, update: Update, *, has_jumped: bool) -> None:
        if point is self.end:
            self.updated.emit(update)
        if point is self.cursor.viewpoint or not self.cursor.is_away:
            self._update_shown_epoch()
            self.shown.emit(update)
            if has_jumped:
                self.cursor_changed.emit()

    def _update_shown_epoch(self) -> None:
        epoch = self.mirror.epoch
        if epoch != self._shown_epoch:
            self._shown_epoch = epoch
            self.epoch_changed.emit()

    def _seek_cursor(self, time_ns: int) -> None:
        """Show `time_ns` on the cursor's mirror, which is created if necessary."""
        assert self.disk_history is not None, "nothing is kept to go to"
        self.cursor.go_to(time_ns, self.disk_history)

    def _poll_cursor(self) -> bool:
        failure = self.cursor.finish_opening(self._speed) or self.cursor.pop_failure()
        if failure:
            self.failed.emit(f"The recorded history cannot be read: {failure}")
        point, player = self.cursor.viewpoint, self.cursor.player
        if point is None or player is None:
            return self.cursor.is_opening
        is_busy = self._apply_pending(point)
        self.cursor.step_to_target()
        behind_ns = time.monotonic_ns() - player.now_ns
        if player.is_playing and player.speed > 1 and player.is_at_end and behind_ns < _MAX_HISTORY_DELAY_NS:
            self.go_live()
        return is_busy or self.cursor.is_seeking


class Viewpoint:
    """A source, the state rebuilt from it, and its recent history.

    A timeline has a viewpoint at its end, and another at the cursor after the cursor left the end. With a `player`, a
    seek resets the mirror and the history, and the history before the new position is filled from `overview`.
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
        self.failure = ""
        """Reason why the last rejected update did not fit the state; empty after the next snapshot."""
        self._overview = overview
        self._resync = resync

    def apply(self, update: Update) -> bool:
        """Apply an update of the source. If it does not fit the state, request a snapshot and return False."""
        has_jumped = self.player is not None and self.player.has_jumped
        if has_jumped:
            self.mirror = Mirror()  # the old state may contain requests that end later
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
            self.history.restart(update, self.mirror, self.player.now_ns)
            self.backfill()
        else:
            self.history.add_update(update, self.mirror, self.player.consumed_ns)
        self.has_state = True
        return True

    def backfill(self) -> None:
        """Fill the history before the last seek from the overview. Call it again when the overview has grown."""
        if self.player is not None:
            recording = self.player.recording
            backfill_history(self.history, self._overview, recording.start_ns + round(recording.first_s * 1e9))
            self._backfill_stops()

    def _backfill_stops(self) -> None:
        """Add the engine's pauses before a seek position to the mirror. They are taken from the overview, because the
        recording's delta checkpoints do not contain them.
        """
        hello, now_ns = self.mirror.hello, self.mirror.time_ns
        if hello is None:
            return
        for stop in self._overview.stops.shifted(hello.time_ns - hello.wall_time_ns):
            if hello.time_ns <= stop.begin_ns < now_ns:
                self.mirror.stops.add(stop if stop.end_ns <= now_ns else replace(stop, end_ns=0))


class Cursor:
    """Cursor of a live session, which is away from the live end between `freeze` and `return_to_end`.

    Away from the end, it has a frozen copy of the state that was shown there and, after `go_to`, a playback of the
    recorded history on disk. The attributes that are set in each state:

    - At the end: none; `is_away` is False.
    - Frozen: `frozen`.
    - Opening the history: `frozen`, `_opening`, `target_ns`. `plays_when_open`, `_target_event` and `target_seq` say
      what to do once it is open.
    - Open: `frozen`, `_playback`, `viewpoint`. `target_seq` is set until the step to it was made.
    - Failed: `frozen`, and `viewpoint`, whose last state is still shown. The next `go_to` opens the history again.
    """

    def __init__(self, overview: SessionOverview) -> None:
        self.is_away = False
        self.frozen_ns = 0
        """Monotonic time at which the cursor left the end."""
        self.frozen: Mirror | None = None
        """Copy of the state at `frozen_ns`; None while the cursor is at the end."""
        self.viewpoint: Viewpoint | None = None
        self.target_ns: int | None = None
        """Wall-clock time to seek to once the history is open; None if no seek is pending."""
        self._target_event: tuple[TimedEvent, bool] | None = None
        """Event to seek to, and whether to seek to the frame before it; None to seek to a time."""
        self.plays_when_open = False
        self.target_seq: int | None = None
        """`Frame.seq` to step to once the history is open and has a state; None if no step is pending."""
        self._overview = overview
        self._opening: Background[Recording] | None = None
        self._playback: PlaybackSource | None = None

    @property
    def player(self) -> Player | None:
        """Playback of the recorded history; None unless the history is open."""
        return self._playback

    @property
    def is_opening(self) -> bool:
        return self._opening is not None

    @property
    def is_seeking(self) -> bool:
        """Whether a seek is in progress. Until it ends, updates do not belong to the new position."""
        return self._playback is not None and self._playback.is_seeking

    @property
    def ready_viewpoint(self) -> Viewpoint | None:
        """Viewpoint on the recorded history; None until it has a state to show."""
        return self.viewpoint if self.viewpoint is not None and self.viewpoint.has_state else None

    def freeze(self, mirror: Mirror) -> None:
        """Leave the end and show a copy of `mirror`."""
        self.frozen = copy.deepcopy(mirror)
        self.frozen_ns = time.monotonic_ns()
        self.is_away = True

    def return_to_end(self) -> None:
        self.close()
        self.frozen, self.is_away = None, False

    def go_to(
        self, time_ns: int, disk_history: DiskHistory, event: TimedEvent | None = None, *, before: bool = False
    ) -> None:
        """Seek to `time_ns` (wall clock), after opening the recorded history if necessary.

        With an `event`, seek to the frame that contains it or, if `before`, to the preceding frame.
        """
        self.target_seq = None
        self._target_event = None if event is None else (event, before)
        if self._playback is not None:
            self._seek(self._playback, time_ns)
            return
        self.target_ns = time_ns
        if self._opening is None:
            self._opening = Background(disk_history.open_recording, "kvscope-history")

    def finish_opening(self, speed: float) -> str:
        """Perform the pending seek once the recorded history is open. Returns why it cannot be opened, or ""."""
        opening = self._opening
        if opening is None or not opening.is_finished:
            return ""
        self._opening = None
        recording, time_ns = opening.result, self.target_ns
        self.target_ns = None
        if recording is None or time_ns is None:
            self.plays_when_open, self.target_seq = False, None
            return opening.failure
        from kvscope_telemetry.playback.playback_source import PlaybackSource  # imported late: not needed while live

        source = PlaybackSource(recording, is_playing=False)
        self._seek(source, time_ns)
        source.set_speed(speed)
        self._playback = source
        self.viewpoint = Viewpoint(source, self._overview, player=source)  # a PlaybackSource is also a player
        if self.plays_when_open:
            source.play()
        self.plays_when_open = False
        return ""

    def _seek(self, source: PlaybackSource, time_ns: int) -> None:
        seconds, event = (time_ns - source.recording.start_ns) / 1e9, self._target_event
        if event is None:
            source.seek(seconds, with_past=False)
        else:
            source.seek_event(seconds, event[0].event, before=event[1])

    def pop_failure(self) -> str:
        """Return and clear the reason why the recorded history can no longer be read; "" without an error.

        The shown state stays. The next seek opens the recording again.
        """
        source = self._playback
        if source is None or not source.failure:
            return ""
        if self.ready_viewpoint is not None:
            self.frozen_ns = source.consumed_ns
        self._playback = self.target_seq = None
        source.close()  # its thread has ended
        return source.failure

    def step_to_target(self) -> None:
        if (
            self.target_seq is not None
            and self.viewpoint is not None
            and self.viewpoint.has_state
            and self._playback is not None
        ):
            self._playback.step(self.target_seq - self.viewpoint.mirror.seq)
            self.target_seq = None

    def close(self, *, wait: bool = False) -> None:
        """Close the recorded history. With `wait`, block until its thread has ended."""
        opening, self._opening = self._opening, None
        source, self._playback = self._playback, None
        self.viewpoint = self.target_ns = None
        self.plays_when_open, self.target_seq = False, None
        if opening is not None:
            opening.cancel()
            if wait:
                opening.wait(2.0)
        if source is not None and wait:
            source.close()
        elif source is not None:
            threading.Thread(target=source.close, name="kvscope-let-go", daemon=True).start()
