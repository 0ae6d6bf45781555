"""Synchronizes the times of several windows: the other windows follow the user's actions in one.

Owns the list of linked windows, their clock offsets, and the position last sent to each. The active window becomes the
leader when the user moves its time. The other windows go to the same time, pause or play likewise, show the same
visible range, and select the same request or block if they show the same engine start. A window without data at the
leader's time pauses at the nearest end of its data and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from PySide6.QtCore import QObject, QTimer
from PySide6.QtWidgets import QApplication

from kvscope_app.session.session import Session
from kvscope_app.session.time_span import TimeSpan
from kvscope_app.session.timeline import Timeline
from kvscope_app.window.main_window import MainWindow

TICK_MS: Final = 33
_MAX_LEAD_S: Final = 0.1
"""Lead over the leading window, in seconds of playback, above which a following window pauses."""
_MAX_DEVIATION_S: Final = 0.5
"""Deviation from the leading window, in seconds of playback, above which a following window jumps to the
leader's time.
"""
_TOLERANCE_NS: Final = 1_000_000


@dataclass(eq=False)
class LinkedWindow:
    window: MainWindow
    offset_ns: int | None = None
    """Difference of this window's clock to the first window's; None until both have a time range."""
    sent_ns: int | None = None
    """Time to which this window was moved last while the leader is paused; None if it was not moved."""

    @property
    def session(self) -> Session:
        return self.window.session

    @property
    def is_live(self) -> bool:
        return self.session.timeline.is_live


class LinkedTimes(QObject):
    """Links the times of all main windows of a desktop while `is_on`.

    `is_active` returns whether the user is working in a given window.
    """

    def __init__(self, parent: QObject | None = None, is_active: Callable[[MainWindow], bool] | None = None) -> None:
        super().__init__(parent)
        self._is_active = is_active or _is_active
        self._members: list[LinkedWindow] = []
        self._leader: LinkedWindow | None = None
        self._is_following = False
        """Whether time changes are caused by this object at the moment, rather than by the user."""
        self.is_on = False
        self._follow_timer = QTimer(self, interval=TICK_MS)
        self._follow_timer.timeout.connect(self.follow)

    def add(self, window: MainWindow) -> None:
        member = LinkedWindow(window)
        self._members.append(member)
        window.linking.connect(self.link)
        window.closing.connect(self._remove)
        window.session.timeline.moved.connect(partial(self._on_moved, member))
        window.session.timeline.shared_zoom.changed.connect(partial(self._on_range, member))
        window.session.selection.changed.connect(partial(self._on_selected, member))
        self._notify()

    def link(self, on: bool) -> None:
        self.is_on = on and len(self._members) > 1
        self._leader = None
        for member in self._members:
            member.offset_ns = member.sent_ns = None
        if self.is_on:
            self._leader = next((member for member in self._members if self._is_active(member.window)), None)
            self._leader = self._leader or self._members[0]
            self._follow_timer.start()
            self.follow()
            if self._leader.session.timeline.shared_zoom.span is not None:
                self._share_range(self._leader)
        else:
            self._follow_timer.stop()
        self._notify()

    def follow(self) -> None:
        leader = self._leader
        if leader is None:
            return
        self._set_offsets()
        self._is_following = True
        try:
            for member in self._members:
                if member is not leader and leader.offset_ns is not None and member.offset_ns is not None:
                    self._follow_time(member, leader, member.offset_ns - leader.offset_ns)
        finally:
            self._is_following = False

    # private: actions of the user

    def _on_moved(self, member: LinkedWindow) -> None:
        if self.is_on and not self._is_following and self._is_active(member.window):
            self._leader = member
            member.sent_ns = None

    def _on_range(self, member: LinkedWindow) -> None:
        if self.is_on and not self._is_following and self._is_active(member.window):
            self._share_range(member)

    def _on_selected(self, member: LinkedWindow) -> None:
        if not self.is_on or self._is_following or not self._is_active(member.window):
            return
        self._is_following = True
        try:
            lead = member.session
            for other in self._members:
                if (
                    other is not member
                    and lead.mirror.epoch is not None
                    and other.session.mirror.epoch == lead.mirror.epoch
                ):
                    _select_same(other.session, lead)
        finally:
            self._is_following = False

    def _remove(self, window: MainWindow) -> None:
        self._members = [member for member in self._members if member.window is not window]
        if self._leader is not None and self._leader.window is window:
            self._leader = self._members[0] if self._members else None
        if self.is_on and len(self._members) < 2:
            self.link(False)
        self._notify()

    # private: following

    def _set_offsets(self) -> None:
        """Set each window's clock offset once.

        The offset is 0 if the window's recording overlaps the first window's, else the difference of their starts.
        """
        first = self._members[0].session.timeline.range_ns
        for member in self._members:
            range_ns = member.session.timeline.range_ns
            if member.offset_ns is None and range_ns is not None and first is not None:
                overlaps = first[0] <= range_ns[1] and range_ns[0] <= first[1]
                member.offset_ns = 0 if overlaps else range_ns[0] - first[0]
                self._notify()

    def _follow_time(self, member: LinkedWindow, leader: LinkedWindow, offset_ns: int) -> None:
        timeline, lead = member.session.timeline, leader.session.timeline
        if leader.is_live and not timeline.is_file:
            member.sent_ns = None
            if timeline.is_paused:
                timeline.go_live()
            member.window.set_link_text(self._link_text(member))
            return
        range_ns = timeline.range_ns
        if range_ns is None:
            return
        wanted_ns = lead.cursor_ns + offset_ns
        nearest_ns = max(range_ns[0], min(wanted_ns, range_ns[1]))
        has_data = abs(nearest_ns - wanted_ns) <= _TOLERANCE_NS or (wanted_ns > range_ns[1] and not timeline.is_file)
        member.window.set_link_text(self._link_text(member, has_data=has_data))
        if lead.is_playing and has_data:
            _play_in_sync(member, lead, wanted_ns)
        else:
            _seek_follower(member, nearest_ns)

    def _share_range(self, member: LinkedWindow) -> None:
        span, self._is_following = member.session.timeline.shared_zoom.span, True
        try:
            for other in self._members:
                if other is member or other.offset_ns is None or member.offset_ns is None:
                    continue
                offset_ns = other.offset_ns - member.offset_ns
                moved = None if span is None else TimeSpan(span.begin_ns + offset_ns, span.end_ns + offset_ns)
                other.session.timeline.shared_zoom.show(moved)
        finally:
            self._is_following = False

    def _notify(self) -> None:
        for member in self._members:
            member.window.set_may_link(len(self._members) > 1)
            member.window.set_link_text(self._link_text(member) if self.is_on else "")

    def _link_text(self, member: LinkedWindow, *, has_data: bool = True) -> str:
        if not has_data:
            return "Times linked: nothing was recorded at this time"
        return "Times linked" if not member.offset_ns else "Times linked by their starts"


def _play_in_sync(member: LinkedWindow, lead: Timeline, wanted_ns: int) -> None:
    """Play at the leader's speed. Pause a follower that is ahead; move one that deviates too much."""
    timeline, member.sent_ns = member.session.timeline, None
    if timeline.speed != lead.speed:
        timeline.set_speed(lead.speed)
    ahead_s = (timeline.cursor_ns - wanted_ns) / 1e9 / lead.speed
    if ahead_s < -_MAX_DEVIATION_S or ahead_s > _MAX_DEVIATION_S:
        timeline.go_to(wanted_ns)
    if ahead_s > _MAX_LEAD_S and timeline.is_playing:
        timeline.pause()
    elif ahead_s <= _MAX_LEAD_S and not timeline.is_playing:
        timeline.play()


def _seek_follower(member: LinkedWindow, time_ns: int) -> None:
    timeline = member.session.timeline
    if timeline.is_playing:
        timeline.pause()
    if member.sent_ns is None or abs(member.sent_ns - time_ns) > _TOLERANCE_NS:
        member.sent_ns = time_ns
        if abs(timeline.cursor_ns - time_ns) > _TOLERANCE_NS:
            timeline.go_to(time_ns)


def _select_same(session: Session, lead: Session) -> None:
    if lead.selection.batch:
        session.selection.select_batch(lead.selection.batch)
    elif lead.selection.highlighted_rows is not None:
        session.selection.highlight_rows(lead.selection.highlighted_rows)
    else:
        session.selection.select_request(lead.selection.request)
    session.selection.select_block(lead.selection.block)


def _is_active(window: MainWindow) -> bool:
    """Whether `window` or one of its dialogs is the active window."""
    active = QApplication.activeWindow()
    while active is not None and active is not window:
        active = active.parentWidget()
    return active is window
