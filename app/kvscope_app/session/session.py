"""A watched source with its timeline, its current state and the user's selection. Views access all data through it.

Applies the source's updates once per display frame on the GUI thread, and extends the overview. `SourceTimeline` owns
the shown state, the movement in time and the signals about them. This module owns the selection, the connection to the
engine and the recorded data. It knows no widgets.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from PySide6.QtCore import QObject, Signal

from kvscope_app.session.block_texts.known_contents import KnownContents
from kvscope_app.session.history import History
from kvscope_app.session.links import Player, contents_of, link_of, player_of
from kvscope_app.session.pace import FRAME_MS, PollTimer
from kvscope_app.session.recording.bookmarks import Bookmarks
from kvscope_app.session.recording.own_handle import OwnHandle
from kvscope_app.session.session_requests import LiveRequests, RecordedRequests
from kvscope_app.session.source_timeline import SourceTimeline
from kvscope_app.session.state_text import KEPT_AGAIN, not_kept_text
from kvscope_telemetry.errors import EngineDead
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.commands import Abort, Command, GetAllocatorMap, GetBlockText, GetStatus, Submit
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.messages.telemetry import MemoryBreakdown
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.sync import FIRST_TAG
from kvscope_telemetry.source import Source, SourceState, SourceStatus, Update
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import TimedEvent

if TYPE_CHECKING:
    from kvscope_app.session.block_texts.session_texts import SessionTexts
    from kvscope_app.session.overview_reading import OverviewReading
    from kvscope_app.session.recording.kept_timeline import KeptTimeline
    from kvscope_app.session.recording.recorded_texts import RecordedTexts
    from kvscope_app.session.recording.recorder import Recorder

STATUS_EVERY_NS: Final = 250_000_000
"""Shortest interval between `status_changed` signals.

An idle session emits it once per second, for views that show one.
"""
OVERVIEW_CALM_NS: Final = 4_000_000_000
"""Interval of overview updates while nothing happens. Longer, because its views repaint completely on each update."""


class Session(QObject):
    """Owns the overview, the selection, the bookmarks and the readers of recordings.

    Signals are emitted on the GUI thread.
    """

    status_changed = Signal()
    selection_changed = Signal()
    overview_changed = Signal()
    requests_changed = Signal()
    """Emitted when `requests` has more data, at most a few times per second."""
    noticed = Signal(str)
    """Emitted with a sentence that the user should read."""
    kept_failed = Signal(str)
    """Emitted with the reason why history or a recording is no longer written.

    The text is also emitted by `noticed`. This signal is for views that must not let the user miss it.
    """
    replies = Signal(list)
    """Emitted with new `Reply` objects. Each receiver picks its own by request ID or tag."""

    def __init__(self, source: Source, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.source = source
        self.overview = SessionOverview()
        """Seconds and events of the whole timeline; it grows. Use only on the GUI thread."""
        self.timeline = SourceTimeline(source, self.overview, self)
        self.kept: KeptTimeline | None = None
        """Retained history of a live source, or None."""
        self.bookmarks = Bookmarks(self)
        self.bookmarks.failed.connect(self.noticed)
        self._link = link_of(source)
        self._played = player_of(source)
        self._texts: SessionTexts | None = None
        self._recorded_texts: RecordedTexts | None = None
        contents = contents_of(source)
        self._contents = None if contents is None else KnownContents(contents)
        self._reading: OverviewReading | None = None
        self._requests: LiveRequests | RecordedRequests | None = None if self._played is not None else LiveRequests()
        self._requests_told: tuple[object, ...] = (0, 1.0, "")
        self.status: SourceStatus = source.status
        self._status_told_ns = self._overview_taken_ns = 0
        self._end_reason = ""
        self.selected_request: int | None = None
        self.selected_block: int | None = None
        """Selected row of the shown ledger."""
        self.selected_blocks: npt.NDArray[np.uint32] | None = None
        """Rows of the ledger that are highlighted instead of the blocks of a request."""
        self.selected_batch: tuple[int, ...] = ()
        """Requests of a step that are highlighted together instead of one."""
        self._selects_whom = False
        """Whether the request of the shown event is still to be selected, once the event's engine start is shown."""
        self._told_failure = ""
        self.pace = PollTimer(self)
        self.pace.timeout.connect(self.poll)
        self.timeline.updated.connect(self._add_to_requests)
        self.timeline.moved.connect(self._look_often)
        self.timeline.epoch_changed.connect(self.clear_selection)
        self.timeline.shown.connect(self._select_whom)
        self.timeline.event_chosen.connect(self._on_event_chosen)
        self.timeline.failed.connect(self.noticed)
        if self._played is not None:
            self._read_overview(self._played)

    def start(self) -> None:
        self.pace.start()

    def keep(self, kept: KeptTimeline) -> None:
        """Set the retained history. The session closes it."""
        self.kept = kept
        self.timeline.kept = kept
        self.bookmarks.keep = kept.mark

    def close(self) -> None:
        """Stop, close the source and delete the retained history. Idempotent."""
        self.pace.stop()
        self.timeline.close()
        if self._reading is not None:
            self._reading.close()
        if self._requests is not None:
            self._requests.close()
        if self._texts is not None:
            self._texts.close()
        if self._recorded_texts is not None:
            self._recorded_texts.close()
        kept, self.kept = self.kept, None
        self.source.close()
        if kept is not None:
            kept.close()

    def poll(self) -> None:
        """Apply what was received and emit the signals. Called by the timer."""
        is_busy = self.timeline.take_updates()
        if self._link is not None and (replies := self._link.poll_replies()):
            is_busy = True
            self.replies.emit(replies)
        if self._contents is not None and (answered := self._contents.poll_replies()):
            self.replies.emit(answered)
        counters = self.live_mirror.counters
        is_busy = is_busy or (self._requests is not None and self._requests.share < 1)
        self.pace.keep(is_busy, is_waiting=bool(counters.num_running + counters.num_waiting))
        self._tell_status()

    def tell_end(self, reason: str) -> None:
        """Set why the engine's process ended, which a source that was never answered cannot detect.

        Empty after a restart.
        """
        self._end_reason = reason
        self._tell_status()

    # What is shown

    @property
    def mirror(self) -> Mirror:
        """State to show: current, frozen when paused, or at the cursor."""
        return self.timeline.mirror

    @property
    def live_mirror(self) -> Mirror:
        """State at the source, independent of the cursor."""
        return self.timeline.end.mirror

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the shown engine; those of kvscope's own engine until the source has sent them."""
        return self.mirror.capabilities

    @property
    def history(self) -> History:
        """Recent history up to the shown time."""
        return self.timeline.history

    @property
    def memory(self) -> MemoryBreakdown | None:
        """Newest memory breakdown at the shown time, or None.

        Before the first one of an engine start, for example right after attaching, a live session returns the parts
        that are constant within an engine start (weights and pool), from the newest breakdown.
        """
        shown, newest = self.history.memory, self.timeline.end.history.memory
        if shown is not None or newest is None or newest.epoch != self.mirror.epoch:
            return shown
        return MemoryBreakdown(
            epoch=newest.epoch,
            time_ns=newest.time_ns,
            weights_bytes=newest.weights_bytes,
            kv_bytes=newest.kv_bytes,
            modules=newest.modules,
            ranks=newest.ranks,
            host_weights_bytes=newest.host_weights_bytes,
        )

    # What the person selected

    def select_request(self, number: int | None) -> None:
        """Select a request in all views, or none. Clears the highlighted blocks and batch."""
        if number == self.selected_request and self.selected_blocks is None and not self.selected_batch:
            return
        self.selected_request, self.selected_blocks, self.selected_batch = number, None, ()
        self.selection_changed.emit()

    def select_batch(self, numbers: tuple[int, ...]) -> None:
        """Highlight the requests of a step in all views, instead of a selected request."""
        if numbers != self.selected_batch:
            self.selected_request, self.selected_blocks, self.selected_batch = None, None, numbers
            self.selection_changed.emit()

    def select_block(self, block: int | None) -> None:
        """Select a row of the ledger in all views, or none."""
        if block == self.selected_block:
            return
        self.selected_block = block
        self.selection_changed.emit()

    def select_blocks(self, rows: npt.NDArray[np.uint32]) -> None:
        """Highlight these rows of the ledger in all views, instead of the blocks of a request."""
        if self.selected_blocks is not None and np.array_equal(rows, self.selected_blocks):
            return
        self.selected_request, self.selected_blocks, self.selected_batch = None, rows, ()
        self.selection_changed.emit()

    def clear_selection(self) -> None:
        self.select_block(None)
        self.select_request(None)

    # The engine at the other end

    @property
    def takes_commands(self) -> bool:
        """Whether the engine accepts commands for control and inspection, such as snapshots, block texts or pausing its
        steps.
        """
        return self._link is not None and self.live_mirror.capabilities.commands

    @property
    def takes_prompts(self) -> bool:
        """Whether the engine accepts prompts, over any protocol."""
        return self._link is not None and self.live_mirror.capabilities.completions

    @property
    def tells_texts(self) -> bool:
        """Whether the contents of blocks can be requested from the engine or the recording."""
        has_anybody = self._link is not None or self._contents is not None
        return has_anybody and self.live_mirror.capabilities.token_ids

    @property
    def tells_allocator(self) -> bool:
        """Whether the segments of torch's allocator can be requested from the engine."""
        return self.takes_commands and self.live_mirror.capabilities.allocator_map

    @property
    def is_viewer(self) -> bool:
        """Whether this client has the role of a viewer, which may not send commands that change anything."""
        return self.status.role == Role.VIEWER

    @property
    def may_operate(self) -> bool:
        """Whether the engine obeys commands of this client."""
        return self.takes_commands and not self.is_viewer

    def ask_status(self) -> None:
        """Request the engine's status. `status` is updated when the reply arrives."""
        self.send(GetStatus(tag=FIRST_TAG))

    def send(self, command: Command) -> bool:
        """Send a command to the engine without blocking. Returns False if no engine can accept it.

        Raises BadInput for a command that is too large.
        """
        if isinstance(command, GetBlockText) and self._contents is not None:
            self._contents.ask(command)
            return True
        if self._link is None or not self._takes(command):
            return False
        self.pace.keep(is_busy=True)
        try:
            self._link.send(command)
        except EngineDead:
            return False
        return True

    def _takes(self, command: Command) -> bool:
        """Whether the engine supports the command."""
        if isinstance(command, Submit | Abort):
            return self.takes_prompts
        if isinstance(command, GetStatus):
            return self.takes_prompts or self.takes_commands
        if isinstance(command, GetAllocatorMap):
            return self.tells_allocator
        return self.tells_texts if isinstance(command, GetBlockText) else self.takes_commands

    # What was recorded

    @property
    def recorder(self) -> Recorder | None:
        return None if self.kept is None else self.kept.recorder

    @property
    def recorded_texts(self) -> RecordedTexts | None:
        """Block contents from the recording or the retained history, or None if neither can contain any."""
        has_any = self._played is not None or (self.kept is not None and self.kept.has_texts)
        if self._recorded_texts is None and has_any:
            from kvscope_app.session.recording.recorded_texts import recorded_texts  # imported late: rarely needed

            self._recorded_texts = recorded_texts(self._played, self.kept)
        return self._recorded_texts

    @property
    def texts(self) -> SessionTexts:
        """Block contents as text at the shown time, from the engine or a recording."""
        if self._texts is None:
            from kvscope_app.session.block_texts.session_texts import SessionTexts

            self._texts = SessionTexts(self, self)
        return self._texts

    def own_handle(self) -> OwnHandle | None:
        """Return a separate handle on the recorded data for use on another thread, or None if nothing is recorded."""
        if self._played is not None:
            return OwnHandle(self._played.recording.reopened, lambda: None)
        return None if self.kept is None else OwnHandle(self.kept.open_recording, self.kept.ring.flush)

    @property
    def requests(self) -> LiveRequests | RecordedRequests:
        """All requests of the session, independent of the shown time. Those of a recording are read on first access."""
        if self._requests is None:
            handle = self.own_handle()
            assert handle is not None, "a recording was opened"
            self._requests = RecordedRequests(handle.get)
        return self._requests

    @property
    def overview_share(self) -> float | None:
        """Completed share of the overview that is being computed, 0 to 1; None if none is being computed."""
        reading = self._reading
        return reading.share if reading is not None and reading.is_computing else None

    @property
    def is_overview_whole(self) -> bool:
        """Whether the overview covers everything that the recording held when it was opened."""
        return self._reading is None or self._reading.is_caught_up

    # private

    def _add_to_requests(self, update: Update) -> None:
        if isinstance(self._requests, LiveRequests):
            self._requests.add_update(update, self.timeline.end.history.engine_wall_ns)

    def _tell_requests(self) -> None:
        if self._requests is not None:
            told = (self._requests.log.version, self._requests.share, self._requests.failure)
            if told != self._requests_told:
                self._requests_told = told
                self.requests_changed.emit()

    def _look_often(self) -> None:
        self.pace.keep(is_busy=True)

    def _on_event_chosen(self, timed: TimedEvent) -> None:
        """Select the request of the event, now or once the event's engine start is shown."""
        self._selects_whom = bool(timed.event.number)
        if self._selects_whom and timed.epoch == self.mirror.epoch:
            self._selects_whom = False
            self.select_request(timed.event.number)

    def _select_whom(self, _: Update) -> None:
        timed = self.timeline.shown_event
        if self._selects_whom and timed is not None and timed.epoch == self.mirror.epoch:
            self._selects_whom = False
            self.select_request(timed.event.number)

    def _status_now(self) -> SourceStatus:
        status = self.source.status
        is_silent = status.state in (SourceState.CONNECTING, SourceState.LOADING, SourceState.STALE)
        if not (self._end_reason and is_silent):
            return status
        return replace(status, state=SourceState.ENDED, reason=self._end_reason)

    def _tell_status(self) -> None:
        status = self._status_now()
        now_ns = time.monotonic_ns()
        if self._is_status_due(status, now_ns):
            self.status = status
            self._status_told_ns = now_ns
            self.extend_overview()
            self._tell_requests()
            if self.kept is not None:
                self._tell_failures(self.kept)
            self.status_changed.emit()

    def _is_status_due(self, status: SourceStatus, now_ns: int) -> bool:
        before, told_ns = self.status, self._status_told_ns
        if _told_at_once(status) != _told_at_once(before):
            return True
        if now_ns - told_ns < STATUS_EVERY_NS:
            return False
        is_at_rest = self.pace.interval() != FRAME_MS and status.reason == before.reason
        return not is_at_rest or self._second(now_ns) != self._second(told_ns)

    def _second(self, time_ns: int) -> int:
        """Return the second on the wall clock."""
        return self.timeline.end.history.wall_ns(time_ns) // 1_000_000_000

    def extend_overview(self) -> None:
        now_ns, has_grown = time.monotonic_ns(), False
        if self.kept is not None and (not self.pace.is_calm or now_ns - self._overview_taken_ns >= OVERVIEW_CALM_NS):
            self._overview_taken_ns = now_ns
            has_grown = self.kept.take_into(self.overview)
        if self.kept is not None and self.kept.ring.start_ns is not None:
            self.bookmarks.forget_before(self.kept.ring.start_ns)
        reading = self._reading
        if reading is not None:
            has_grown = reading.take_into(self.overview) or has_grown
            self.bookmarks.load(reading.take_bookmarks())
            if reading.is_over:
                self._reading = None
                if reading.failure:
                    self.noticed.emit(f"Not all of its overview can be read: {reading.failure}")
        if has_grown:
            if reading is not None:
                self.timeline.end.fill_past()
                self.timeline.cursor_changed.emit()
            self.overview_changed.emit()

    def _tell_failures(self, kept: KeptTimeline) -> None:
        """Report failures of the history and of the recording in one notice, because one full disk may have caused
        both.
        """
        notices, recorder = [], kept.recorder
        if recorder is not None and recorder.failure:
            kept.stop_recording()
            notices.append(f"The recording ended: {recorder.failure}; {recorder.writer.left}")
        if kept.failure and not self._told_failure:
            self._told_failure = kept.failure
            notices.append(not_kept_text(kept.failure, has_some=kept.ring.num_bytes > 0))
        elif self._told_failure and not kept.failure:
            self._told_failure = ""
            self.noticed.emit(KEPT_AGAIN)
        if notices:
            self.noticed.emit(". ".join(notices))
            self.kept_failed.emit(". ".join(notices))

    def _read_overview(self, player: Player) -> None:
        from kvscope_app.session.overview_reading import OverviewReading  # not needed by live sessions

        self._reading = OverviewReading(player.recording)
        self.bookmarks.keep = self._reading.keep_bookmarks


def _told_at_once(status: SourceStatus) -> tuple[object, ...]:
    return status.state, status.role, status.adapters, status.takes_adapters
