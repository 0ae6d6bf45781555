"""A watched source with its timeline, its current state and the user's selection. Views access all data through it.

Applies the source's updates once per display frame on the GUI thread, and extends the overview. `SourceTimeline` owns
the shown state, the movement in time and the signals about them. This module owns the selection, the connection to the
engine and the recorded data. Contains no widgets.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QObject, Signal

from kvscope_app.session.block_texts.block_content_service import BlockContentService
from kvscope_app.session.chat_turns import ChatTurns
from kvscope_app.session.history import History
from kvscope_app.session.links import Player, contents_of, link_of, player_of
from kvscope_app.session.poll_timer import FRAME_MS, PollTimer
from kvscope_app.session.recording.bookmarks import Bookmarks
from kvscope_app.session.recording.recording_handle import RecordingHandle
from kvscope_app.session.session_requests import LiveRequests, RecordedRequests
from kvscope_app.session.session_selection import SessionSelection
from kvscope_app.session.source_timeline import SourceTimeline
from kvscope_app.session.state_text import HISTORY_RESUMED, history_failure_text
from kvscope_telemetry.errors import EngineDead
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.commands import (
    Abort,
    Command,
    EstimatePrompt,
    GetAllocatorMap,
    GetBlockText,
    GetStatus,
    Submit,
)
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.sync import FIRST_TAG
from kvscope_telemetry.source import Source, SourceState, SourceStatus, Update
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import TimedEvent

if TYPE_CHECKING:
    from kvscope_app.session.block_texts.session_texts import SessionTexts
    from kvscope_app.session.overview_reader import OverviewReader
    from kvscope_app.session.recording.disk_history import DiskHistory
    from kvscope_app.session.recording.recorded_texts import RecordedTexts
    from kvscope_app.session.recording.recorder import Recorder

STATUS_INTERVAL_NS: Final = 250_000_000
"""Minimum interval in ns between `status_changed` signals. While idle, the signal is emitted once per second."""
IDLE_OVERVIEW_INTERVAL_NS: Final = 4_000_000_000
"""Interval in ns of overview updates while the engine is idle. Long, because views repaint completely on each update.
"""


class Session(QObject):
    """Owns the overview, the selection, the bookmarks and the readers of recordings of one watched source.

    Signals are emitted on the GUI thread.
    """

    status_changed = Signal()
    overview_changed = Signal()
    requests_changed = Signal()
    """Emitted when `requests` has more data, at most a few times per second."""
    noticed = Signal(str)
    """Emitted with a sentence to show to the user."""
    history_failed = Signal(str)
    """Emitted with the reason why the history or a recording is no longer written.

    `noticed` is emitted with the same text. This signal is for widgets that keep showing the failure.
    """
    replies = Signal(list)
    """Emitted with a list of `Reply` when replies have arrived. Each receiver selects its own by request id or tag."""

    def __init__(self, source: Source, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.source = source
        self.overview = SessionOverview()
        """Seconds and events of the whole timeline, extended while the session runs. For the GUI thread only."""
        self.timeline = SourceTimeline(source, self.overview, self)
        self.disk_history: DiskHistory | None = None
        self.selection = SessionSelection(self)
        self.chat_turns = ChatTurns(self)
        self.bookmarks = Bookmarks(self)
        self.bookmarks.failed.connect(self.noticed)
        self._link = link_of(source)
        self._player = player_of(source)
        self._texts: SessionTexts | None = None
        self._recorded_texts: RecordedTexts | None = None
        contents = contents_of(source)
        self._contents = None if contents is None else BlockContentService(contents)
        self._overview_reader: OverviewReader | None = None
        self._requests: LiveRequests | RecordedRequests | None = None if self._player is not None else LiveRequests()
        self._emitted_requests: tuple[object, ...] = (0, 1.0, "")
        self.status: SourceStatus = source.status
        self._status_emitted_ns = self._overview_extended_ns = 0
        self._end_reason = ""
        self._selects_event_request = False
        """Whether to select the request of the shown event, once the event's engine start is shown."""
        self._reported_failure = ""
        self.poll_timer = PollTimer(self)
        self.poll_timer.timeout.connect(self.poll)
        self.timeline.updated.connect(self._add_to_requests)
        self.timeline.moved.connect(self._poll_at_frame_rate)
        self.timeline.epoch_changed.connect(self.selection.clear)
        self.timeline.shown.connect(self._select_event_request)
        self.timeline.event_chosen.connect(self._on_event_chosen)
        self.timeline.failed.connect(self.noticed)
        if self._player is not None:
            self._read_overview(self._player)

    def start(self) -> None:
        self.poll_timer.start()

    def set_disk_history(self, history: DiskHistory) -> None:
        """Set the history on disk. The session closes it."""
        self.disk_history = history
        self.timeline.disk_history = history
        self.bookmarks.store = history.store_bookmarks

    def close(self) -> None:
        """Stop, close the source and delete the history on disk. Idempotent."""
        self.poll_timer.stop()
        self.timeline.close()
        if self._overview_reader is not None:
            self._overview_reader.close()
        if self._requests is not None:
            self._requests.close()
        if self._texts is not None:
            self._texts.close()
        if self._recorded_texts is not None:
            self._recorded_texts.close()
        disk_history, self.disk_history = self.disk_history, None
        self.source.close()
        if disk_history is not None:
            disk_history.close()

    def poll(self) -> None:
        """Apply received updates and emit the signals. Called by the timer."""
        is_busy = self.timeline.apply_updates()
        if self._link is not None and (replies := self._link.poll_replies()):
            is_busy = True
            self.replies.emit(replies)
        if self._contents is not None and (contents_replies := self._contents.pop_replies()):
            self.replies.emit(contents_replies)
        counters = self.live_mirror.counters
        is_busy = is_busy or (self._requests is not None and self._requests.share < 1)
        self.poll_timer.update_interval(is_busy, is_waiting=bool(counters.num_running + counters.num_waiting))
        self._emit_status()

    def set_end_reason(self, reason: str) -> None:
        """Set the reason why the engine's process ended, or "" after a restart.

        A source that never received an answer cannot detect that the process has ended.
        """
        self._end_reason = reason
        self._emit_status()

    # What is shown

    @property
    def mirror(self) -> Mirror:
        """State to show: the current state, the frozen state when paused, or the state at the cursor."""
        return self.timeline.mirror

    @property
    def live_mirror(self) -> Mirror:
        """Current state of the source, independent of the cursor."""
        return self.timeline.end.mirror

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the shown engine, or those of kvscope's own engine until the source has sent them."""
        return self.mirror.capabilities

    @property
    def history(self) -> History:
        return self.timeline.history

    # The engine at the other end

    @property
    def accepts_commands(self) -> bool:
        """Whether the engine accepts commands for control and inspection, such as snapshots, block texts or pausing."""
        return self._link is not None and self.live_mirror.capabilities.commands

    @property
    def accepts_prompts(self) -> bool:
        """Whether the engine accepts prompts, over any protocol."""
        return self._link is not None and self.live_mirror.capabilities.completions

    @property
    def provides_texts(self) -> bool:
        """Whether the contents of blocks can be requested from the engine or the recording."""
        has_provider = self._link is not None or self._contents is not None
        return has_provider and self.live_mirror.capabilities.token_ids

    @property
    def provides_allocator_map(self) -> bool:
        """Whether the segments of torch's allocator can be requested from the engine."""
        return self.accepts_commands and self.live_mirror.capabilities.allocator_map

    @property
    def estimates_prompts(self) -> bool:
        """Whether the engine answers what a prompt would cost."""
        return self.accepts_prompts and not self.is_viewer and self.live_mirror.capabilities.prompt_estimates

    @property
    def is_viewer(self) -> bool:
        """Whether this client has the role of a viewer, which may not send commands that change anything."""
        return self.status.role == Role.VIEWER

    @property
    def may_operate(self) -> bool:
        """Whether the engine executes commands of this client."""
        return self.accepts_commands and not self.is_viewer

    def request_status(self) -> None:
        """Request the engine's status. `status` is updated when the reply arrives."""
        self.send(GetStatus(tag=FIRST_TAG))

    def send(self, command: Command) -> bool:
        """Send a command to the engine without blocking. Returns False if no engine can accept the command.

        Raises BadInput for a command that is too large.
        """
        if isinstance(command, GetBlockText) and self._contents is not None:
            self._contents.request(command)
            return True
        if self._link is None or not self._supports(command):
            return False
        self.poll_timer.update_interval(is_busy=True)
        try:
            self._link.send(command)
        except EngineDead:
            return False
        return True

    def _supports(self, command: Command) -> bool:
        if isinstance(command, Submit | Abort):
            return self.accepts_prompts
        if isinstance(command, EstimatePrompt):
            return self.estimates_prompts
        if isinstance(command, GetStatus):
            return self.accepts_prompts or self.accepts_commands
        if isinstance(command, GetAllocatorMap):
            return self.provides_allocator_map
        return self.provides_texts if isinstance(command, GetBlockText) else self.accepts_commands

    # What was recorded

    @property
    def recorder(self) -> Recorder | None:
        return None if self.disk_history is None else self.disk_history.recorder

    @property
    def recorded_texts(self) -> RecordedTexts | None:
        """Block contents from the recording or the history on disk; None if neither can contain texts."""
        has_any = self._player is not None or (self.disk_history is not None and self.disk_history.has_texts)
        if self._recorded_texts is None and has_any:
            from kvscope_app.session.recording.recorded_texts import recorded_texts  # imported late: rarely needed

            self._recorded_texts = recorded_texts(self._player, self.disk_history)
        return self._recorded_texts

    @property
    def texts(self) -> SessionTexts:
        if self._texts is None:
            from kvscope_app.session.block_texts.session_texts import SessionTexts

            self._texts = SessionTexts(self, self)
        return self._texts

    def new_recording_handle(self) -> RecordingHandle | None:
        """Return a separate handle on the recorded data for another thread; None if nothing is recorded."""
        if self._player is not None:
            return RecordingHandle(self._player.recording.reopened, lambda: None)
        if self.disk_history is None:
            return None
        return RecordingHandle(self.disk_history.open_recording, self.disk_history.ring.flush)

    @property
    def requests(self) -> LiveRequests | RecordedRequests:
        """All requests of the session, independent of the shown time. Those of a recording are read on first access."""
        if self._requests is None:
            handle = self.new_recording_handle()
            assert handle is not None, "a recording was opened"
            self._requests = RecordedRequests(handle.get)
        return self._requests

    @property
    def overview_share(self) -> float | None:
        """Fraction of the overview that is computed, 0 to 1; None if no overview is being computed."""
        reader = self._overview_reader
        return reader.share if reader is not None and reader.is_computing else None

    @property
    def is_overview_complete(self) -> bool:
        """Whether the overview covers all data that the recording had when it was opened."""
        return self._overview_reader is None or self._overview_reader.is_caught_up

    # private

    def _add_to_requests(self, update: Update) -> None:
        if isinstance(self._requests, LiveRequests):
            self._requests.add_update(update, self.timeline.end.history.engine_wall_ns)

    def _emit_requests_changed(self) -> None:
        if self._requests is not None:
            requests = (self._requests.log.version, self._requests.share, self._requests.failure)
            if requests != self._emitted_requests:
                self._emitted_requests = requests
                self.requests_changed.emit()

    def _poll_at_frame_rate(self) -> None:
        self.poll_timer.update_interval(is_busy=True)

    def _on_event_chosen(self, timed: TimedEvent) -> None:
        self._selects_event_request = bool(timed.event.number)
        if self._selects_event_request and timed.epoch == self.mirror.epoch:
            self._selects_event_request = False
            self.selection.select_request(timed.event.number)

    def _select_event_request(self, _: Update) -> None:
        timed = self.timeline.shown_event
        if self._selects_event_request and timed is not None and timed.epoch == self.mirror.epoch:
            self._selects_event_request = False
            self.selection.select_request(timed.event.number)

    def _current_status(self) -> SourceStatus:
        status = self.source.status
        is_silent = status.state in (SourceState.CONNECTING, SourceState.LOADING, SourceState.STALE)
        if not (self._end_reason and is_silent):
            return status
        return replace(status, state=SourceState.ENDED, reason=self._end_reason)

    def _emit_status(self) -> None:
        status = self._current_status()
        now_ns = time.monotonic_ns()
        if self._is_status_due(status, now_ns):
            self.status = status
            self._status_emitted_ns = now_ns
            self.extend_overview()
            self._emit_requests_changed()
            if self.disk_history is not None:
                self._report_failures(self.disk_history)
            self.status_changed.emit()

    def _is_status_due(self, status: SourceStatus, now_ns: int) -> bool:
        before, reported_ns = self.status, self._status_emitted_ns
        if _urgent_fields(status) != _urgent_fields(before):
            return True
        if now_ns - reported_ns < STATUS_INTERVAL_NS:
            return False
        is_at_rest = self.poll_timer.interval() != FRAME_MS and status.reason == before.reason
        return not is_at_rest or self._second(now_ns) != self._second(reported_ns)

    def _second(self, time_ns: int) -> int:
        return self.timeline.end.history.wall_ns(time_ns) // 1_000_000_000

    def extend_overview(self) -> None:
        now_ns, has_grown = time.monotonic_ns(), False
        if self.disk_history is not None and (
            not self.poll_timer.is_calm or now_ns - self._overview_extended_ns >= IDLE_OVERVIEW_INTERVAL_NS
        ):
            self._overview_extended_ns = now_ns
            has_grown = self.disk_history.drain_into(self.overview)
        if self.disk_history is not None and self.disk_history.ring.start_ns is not None:
            self.bookmarks.drop_before(self.disk_history.ring.start_ns)
        reader = self._overview_reader
        if reader is not None:
            has_grown = reader.drain_into(self.overview) or has_grown
            self.bookmarks.load(reader.pop_bookmarks())
            if reader.is_finished:
                self._overview_reader = None
                if reader.failure:
                    self.noticed.emit(f"Not all of its overview can be read: {reader.failure}")
        if has_grown:
            if reader is not None:
                self.timeline.end.backfill()
                self.timeline.cursor_changed.emit()
            self.overview_changed.emit()

    def _report_failures(self, disk_history: DiskHistory) -> None:
        """Report failures of the history and of the recording in one notice, as a full disk may have caused both."""
        notices, recorder = [], disk_history.recorder
        if recorder is not None and recorder.failure:
            disk_history.stop_recording()
            notices.append(f"The recording ended: {recorder.failure}; {recorder.writer.saved_text}")
        if disk_history.failure and not self._reported_failure:
            self._reported_failure = disk_history.failure
            notices.append(history_failure_text(disk_history.failure, has_some=disk_history.ring.num_bytes > 0))
        elif self._reported_failure and not disk_history.failure:
            self._reported_failure = ""
            self.noticed.emit(HISTORY_RESUMED)
        if notices:
            self.noticed.emit(". ".join(notices))
            self.history_failed.emit(". ".join(notices))

    def _read_overview(self, player: Player) -> None:
        from kvscope_app.session.overview_reader import OverviewReader  # not needed by live sessions

        self._overview_reader = OverviewReader(player.recording)
        self.bookmarks.store = self._overview_reader.save_bookmarks


def _urgent_fields(status: SourceStatus) -> tuple[object, ...]:
    return status.state, status.role, status.adapters, status.takes_adapters
