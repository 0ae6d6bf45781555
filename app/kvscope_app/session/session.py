"""One source, the state rebuilt from it, and what the person selected. The views' only door to the data.

Takes the source's update once a display frame on the GUI thread, applies it to the mirror and the history,
and tells the views. Knows no widget.

LIVE and PAUSED: while paused everything is still taken and applied, so nothing is lost, but the views see a
copy of the mirror as it was. There is no recording to play on from in between, so resuming shows the present,
as going live does. A recording is paused at its source instead: then its time stands still.
"""

from __future__ import annotations

import copy
import time
from typing import Final, Protocol, runtime_checkable

from PySide6.QtCore import QObject, Qt, QTimer, Signal

from kvscope_app.session.history import History
from kvscope_telemetry.errors import EngineDead, ProtocolError
from kvscope_telemetry.messages.commands import Command, Reply
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.source import Source, SourceStatus, Update
from kvscope_telemetry.state.mirror import Mirror

FRAME_MS: Final = 16
IDLE_MS: Final = 100
"""How often is looked while nothing comes but signs of life: nobody sees that the first frame came so much later."""
_BUSY_FOR_NS: Final = 1_000_000_000
STATUS_EVERY_NS: Final = 250_000_000


@runtime_checkable
class LiveLink(Protocol):
    """The part of a live source that a recording has not: the other end can be told and asked."""

    def send(self, command: Command) -> None:
        """Queue the command; never blocks."""

    def take_replies(self) -> list[Reply]:
        """Answers that came since the last call."""

    def resync(self) -> None:
        """What came could not be applied: ask for the whole state."""


@runtime_checkable
class Player(Protocol):
    """The part of a recording's source that a live one has not: time is what the person makes of it, in seconds."""

    has_jumped: bool
    """Whether the update taken last is the first after a seek."""

    @property
    def note(self) -> str:
        """What is wrong with the file, empty when nothing is known to be."""

    @property
    def note_detail(self) -> str:
        """The same at length, a line each."""

    @property
    def position(self) -> float: ...
    @property
    def duration(self) -> float: ...
    @property
    def now_ns(self) -> int:
        """The position, on this machine's monotonic clock."""

    @property
    def taken_ns(self) -> int:
        """The same of the update taken last."""

    @property
    def is_playing(self) -> bool: ...
    @property
    def speed(self) -> float: ...
    def play(self) -> None: ...
    def pause(self) -> None: ...
    def seek(self, seconds: float, *, with_past: bool = True) -> None: ...
    def set_speed(self, factor: float) -> None: ...
    def resync(self) -> None: ...


class Session(QObject):
    """Owns `source`, its `mirror` and `history`. Signals are emitted on the GUI thread."""

    updated = Signal(object)
    """An `Update` was applied (also while paused)."""
    status_changed = Signal()
    selection_changed = Signal()
    paused_changed = Signal()
    replies = Signal(list)
    """`Reply` objects that came; each reader picks its own by request id or tag."""

    def __init__(self, source: Source, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.source = source
        self._link = source if isinstance(source, LiveLink) else None
        self.player = source if isinstance(source, Player) else None
        """There when a recording is played."""
        self.history = History()
        self.status: SourceStatus = source.status
        self.selected_request: int | None = None
        self._live = Mirror()
        self._frozen: Mirror | None = None
        self._paused_at_ns = 0
        self._status_told_ns = 0
        self._busy_ns = 0
        self._timer = QTimer(self, timerType=Qt.TimerType.PreciseTimer, interval=FRAME_MS)
        self._timer.timeout.connect(self.poll)

    def start(self) -> None:
        """Begin to take updates."""
        self._timer.start()

    def close(self) -> None:
        """Stop and close the source; idempotent."""
        self._timer.stop()
        self.source.close()

    @property
    def mirror(self) -> Mirror:
        """The state to show: as it is, or as it was when paused."""
        return self._live if self._frozen is None else self._frozen

    @property
    def live_mirror(self) -> Mirror:
        """The state as it is, paused or not."""
        return self._live

    @property
    def paused(self) -> bool:
        """Whether the views stand still."""
        return self._frozen is not None

    @property
    def shown_until_ns(self) -> int:
        """Our monotonic time of what is shown: now, the moment of the pause, or where a recording is."""
        if self.player is not None:
            return self.player.now_ns
        return self._paused_at_ns if self.paused else time.monotonic_ns()

    @property
    def behind_seconds(self) -> float:
        """How far what is shown lies behind the present."""
        return (time.monotonic_ns() - self._paused_at_ns) / 1e9 if self.paused else 0.0

    def set_paused(self, paused: bool) -> None:
        """Freeze the views at this moment, or let them go on with the present."""
        if paused == self.paused:
            return
        self._frozen = copy.deepcopy(self._live) if paused else None
        self._paused_at_ns = time.monotonic_ns()
        self.paused_changed.emit()

    def select_request(self, number: int | None) -> None:
        """Select a request in every view, or nothing."""
        if number == self.selected_request:
            return
        self.selected_request = number
        self.selection_changed.emit()

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

    def poll(self) -> None:
        """Take what came, apply it, and tell. Called by the timer each display frame."""
        is_busy = self.player is not None and self.player.is_playing
        update = self.source.take()
        while update is not None:
            is_busy = is_busy or not update.is_sign_of_life
            self._apply(update)
            update = None if self.player is None else self.source.take()  # a recording gives short spans
        if self._link is not None and (replies := self._link.take_replies()):
            is_busy = True
            self.replies.emit(replies)
        self._keep_pace(is_busy)
        self._tell_status()

    def _keep_pace(self, is_busy: bool) -> None:
        """Look at every display frame while something happens, and for a second after."""
        now_ns = time.monotonic_ns()
        if is_busy:
            self._busy_ns = now_ns
        wanted_ms = FRAME_MS if now_ns - self._busy_ns < _BUSY_FOR_NS else IDLE_MS
        if wanted_ms != self._timer.interval():
            self._timer.setInterval(wanted_ms)

    def _apply(self, update: Update) -> None:
        epoch = self._live.epoch
        if self.player is not None and self.player.has_jumped:
            self._live = Mirror()  # what ended after this time has not ended yet
            self.history.clear()
        try:
            self._live.apply(update)
        except ProtocolError:  # refused whole: a snapshot makes it good
            other_end = self._link or self.player
            if other_end is not None:
                other_end.resync()
            return
        self.history.add(update, self._live, time.monotonic_ns() if self.player is None else self.player.taken_ns)
        if self._live.epoch != epoch:
            self.select_request(None)  # numbers of requests start again with an epoch
        self.updated.emit(update)

    def _tell_status(self) -> None:
        status = self.source.status
        now_ns = time.monotonic_ns()
        before = self.status
        is_news = (status.state, status.reason, status.role) != (before.state, before.reason, before.role)
        if is_news or now_ns - self._status_told_ns >= STATUS_EVERY_NS:
            self.status = status
            self._status_told_ns = now_ns
            self.status_changed.emit()
