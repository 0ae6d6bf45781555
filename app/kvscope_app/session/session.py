"""A source watched: its timeline, the state there, and what the person selected. The views' only door to the data.

Takes the source's updates once a display frame on the GUI thread and fills the overview. What is shown and how it is
moved in time is its timeline's, and so are signals about that; here are the selection, the engine at the other end, and
what was recorded. Knows no widget.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from PySide6.QtCore import QObject, Signal

from kvscope_app.session.history import History
from kvscope_app.session.kept.bookmarks import Bookmarks
from kvscope_app.session.kept.own_handle import OwnHandle
from kvscope_app.session.links import Player, contents_of, link_of, player_of
from kvscope_app.session.pace import FRAME_MS, PollTimer
from kvscope_app.session.session_requests import LiveRequests, RecordedRequests
from kvscope_app.session.source_timeline import SourceTimeline
from kvscope_app.session.state_text import KEPT_AGAIN, not_kept_text
from kvscope_app.session.texts.known_contents import KnownContents
from kvscope_telemetry.errors import EngineDead
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.commands import Abort, Command, GetAllocatorMap, GetBlockText, GetStatus, Submit
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.messages.telemetry import MemoryBreakdown
from kvscope_telemetry.source import Source, SourceState, SourceStatus, Update
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.state.sync import FIRST_TAG
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import TimedEvent

if TYPE_CHECKING:
    from kvscope_app.session.kept.kept_timeline import KeptTimeline
    from kvscope_app.session.kept.recorded_texts import RecordedTexts
    from kvscope_app.session.kept.recorder import Recorder
    from kvscope_app.session.overview_reading import OverviewReading
    from kvscope_app.session.texts.session_texts import SessionTexts

STATUS_EVERY_NS: Final = 250_000_000
"""How often is told how things stand; at rest with each new second, for what shows one."""
OVERVIEW_CALM_NS: Final = 4_000_000_000
"""How often the overview goes on while nothing happens in it: what draws it draws all of it anew."""


class Session(QObject):
    """Owns the overview, the selection, the bookmarks and what is read of recordings. Signals are emitted on the GUI
    thread."""

    status_changed = Signal()
    selection_changed = Signal()
    overview_changed = Signal()
    requests_changed = Signal()
    """More of `requests` is known; emitted a few times per second at most."""
    noticed = Signal(str)
    """Something a person should read, in a sentence."""
    kept_failed = Signal(str)
    """What is no longer kept or recorded, and why: noticed as well, but nobody should miss it."""
    replies = Signal(list)
    """`Reply` objects that came; each reader picks its own by request id or tag."""

    def __init__(self, source: Source, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.source = source
        self.overview = SessionOverview()
        """Seconds and events of the whole timeline; it grows. For the GUI thread."""
        self.timeline = SourceTimeline(source, self.overview, self)
        self.kept: KeptTimeline | None = None
        """What of a live source there is to go back to."""
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
        """A row of the ledger shown."""
        self.selected_blocks: npt.NDArray[np.uint32] | None = None
        """Rows of the ledger that stand out instead of a request's."""
        self.selected_batch: tuple[int, ...] = ()
        """Requests that stand out together instead of one: those of a step."""
        self._selects_whom = False
        """Whether the request of the event that is shown is to be selected, once its engine start is what is shown."""
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
        """Begin to take updates."""
        self.pace.start()

    def keep(self, kept: KeptTimeline) -> None:
        """From now on `kept` is what there is to go back to. It is ours to end."""
        self.kept = kept
        self.timeline.kept = kept
        self.bookmarks.keep = kept.mark

    def close(self) -> None:
        """Stop, close the source and delete what was kept; idempotent."""
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
        """Take what came, apply it, and tell. Called by the timer each display frame."""
        is_busy = self.timeline.take_updates()
        if self._link is not None and (replies := self._link.take_replies()):
            is_busy = True
            self.replies.emit(replies)
        if self._contents is not None and (answered := self._contents.take_replies()):
            self.replies.emit(answered)
        counters = self.live_mirror.counters
        is_busy = is_busy or (self._requests is not None and self._requests.share < 1)
        self.pace.keep(is_busy, is_waiting=bool(counters.num_running + counters.num_waiting))
        self._tell_status()

    def tell_end(self, reason: str) -> None:
        """The engine's process is known to have ended, which a source that was never answered cannot tell; empty: it
        was started anew."""
        self._end_reason = reason
        self._tell_status()

    # What is shown

    @property
    def mirror(self) -> Mirror:
        """The state to show: as it is, as it was when paused, or as it was at the cursor."""
        return self.timeline.mirror

    @property
    def live_mirror(self) -> Mirror:
        """The state at the source, wherever the cursor is."""
        return self.timeline.end.mirror

    @property
    def capabilities(self) -> Capabilities:
        """What the engine that is shown can tell and be asked for; our own engine's until it has said."""
        return self.mirror.capabilities

    @property
    def history(self) -> History:
        """What was lately at what is shown."""
        return self.timeline.history

    @property
    def memory(self) -> MemoryBreakdown | None:
        """The newest memory breakdown at what is shown.

        Before the first one of an engine start, as right after attaching, a live session returns what does not change
        within it: the weights and the pool of the newest breakdown.
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

    def select_blocks(self, rows: npt.NDArray[np.uint32]) -> None:
        """Let these rows of the ledger stand out in every view, instead of a request's."""
        if self.selected_blocks is not None and np.array_equal(rows, self.selected_blocks):
            return
        self.selected_request, self.selected_blocks, self.selected_batch = None, rows, ()
        self.selection_changed.emit()

    def clear_selection(self) -> None:
        """Nothing is selected any more."""
        self.select_block(None)
        self.select_request(None)

    # The engine at the other end

    @property
    def takes_commands(self) -> bool:
        """Whether the other end can be asked and told things: requests, snapshots, texts, holding its steps."""
        return self._link is not None and self.live_mirror.capabilities.commands

    @property
    def takes_prompts(self) -> bool:
        """Whether the other end can be sent prompts, in whatever way."""
        return self._link is not None and self.live_mirror.capabilities.completions

    @property
    def tells_texts(self) -> bool:
        """Whether the other end can be asked what blocks hold."""
        has_anybody = self._link is not None or self._contents is not None
        return has_anybody and self.live_mirror.capabilities.token_ids

    @property
    def tells_allocator(self) -> bool:
        """Whether the other end can be asked for the segments of torch's allocator."""
        return self.takes_commands and self.live_mirror.capabilities.allocator_map

    @property
    def is_viewer(self) -> bool:
        """Whether the engine lets us see and do nothing else."""
        return self.status.role == Role.VIEWER

    @property
    def may_operate(self) -> bool:
        """Whether the other end does what it is told."""
        return self.takes_commands and not self.is_viewer

    def ask_status(self) -> None:
        """How the engine is, now: `status` has it soon."""
        self.send(GetStatus(tag=FIRST_TAG))

    def send(self, command: Command) -> bool:
        """Send to the engine; False when there is none that could take it. Never blocks.

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
        """Whether the other end knows what to do with it."""
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
        """The recording that runs."""
        return None if self.kept is None else self.kept.recorder

    @property
    def recorded_texts(self) -> RecordedTexts | None:
        """What blocks held, as the recording or the kept past tells it; None where there is nothing that could."""
        has_any = self._played is not None or (self.kept is not None and self.kept.has_texts)
        if self._recorded_texts is None and has_any:
            from kvscope_app.session.kept.recorded_texts import recorded_texts  # most windows need none of it

            self._recorded_texts = recorded_texts(self._played, self.kept)
        return self._recorded_texts

    @property
    def texts(self) -> SessionTexts:
        """What blocks hold as text at the time that is shown, as the engine or a recording tells it."""
        if self._texts is None:
            from kvscope_app.session.texts.session_texts import SessionTexts

            self._texts = SessionTexts(self, self)
        return self._texts

    def own_handle(self) -> OwnHandle | None:
        """On what was recorded, for a thread of one's own; None where nothing is."""
        if self._played is not None:
            return OwnHandle(self._played.recording.reopened, lambda: None)
        return None if self.kept is None else OwnHandle(self.kept.open_recording, self.kept.ring.flush)

    @property
    def requests(self) -> LiveRequests | RecordedRequests:
        """All requests of the session, whatever moment is shown. Those of a recording are read once they are asked
        for."""
        if self._requests is None:
            handle = self.own_handle()
            assert handle is not None, "a recording was opened"
            self._requests = RecordedRequests(handle.get)
        return self._requests

    @property
    def overview_share(self) -> float | None:
        """How much of the overview of a recording without one is computed, 0 to 1; None when there is nothing to do."""
        reading = self._reading
        return reading.share if reading is not None and reading.is_computing else None

    @property
    def is_overview_whole(self) -> bool:
        """Whether the overview covers all that the recording held when it was opened."""
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
        """The request that it happened to is selected, once the engine start it is of is what is shown."""
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
        """By the wall clock."""
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
        """In one notice: the same full disk may have ended both."""
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
        from kvscope_app.session.overview_reading import OverviewReading  # a live session has its own

        self._reading = OverviewReading(player.recording)
        self.bookmarks.keep = self._reading.keep_bookmarks


def _told_at_once(status: SourceStatus) -> tuple[object, ...]:
    return status.state, status.role, status.adapters, status.takes_adapters
