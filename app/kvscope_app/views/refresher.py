"""Schedules refreshes of views: each at about `refresh_hz`, only while it is visible and its data changed.

The page map follows every update, which `session/poll_timer.py` limits to one per 16 ms.

An idle engine still sends heartbeats, which only move the time axes of charts. After some seconds, views follow them at
a lower rate.

Turns of the event loop are kept short so that keyboard input is not delayed: a turn refreshes either the fast views or
one of the others, which is painted before the next is refreshed. The slow views get a limited share of the time: on a
slow or busy machine they are refreshed less often, while the fast views and keyboard input are not affected.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Final

from PySide6.QtCore import QObject, QTimer

from kvscope_app.session.session import Session
from kvscope_app.views.base import View
from kvscope_app.views.visibility import is_on_screen
from kvscope_telemetry.source import Update

_FAST_HZ: Final = 50.0
"""Views with at least this refresh rate are refreshed on every update, all others one after another between updates."""
_GRACE_NS: Final = 8_000_000
_FAST_GRACE_NS: Final = 12_000_000
"""Nanoseconds by which a view may be refreshed earlier than its rate allows.

Updates are 16 ms apart. After a late update, the next one follows sooner, and without this tolerance the view would
miss a frame.
"""
_TURN_MS: Final = 8
_MIN_GAP_NS: Final = 2_000_000
"""Minimum time in ns between an update and the next turn. Qt runs overdue timers in succession, so without this gap it
would have no time for input between the update and the turn.

A turn that comes too early is postponed, but only once.
"""
_PAUSE_FACTOR: Final = 3
"""Pause after refreshing a slow view, as a multiple of the refresh's duration, so that slow views use at most a quarter
of the time.
"""
_MAX_PAUSE_NS: Final = 500_000_000
_SINGLE_UPDATE_NS: Final = 100_000_000
"""Minimum pause in ns between two updates after which the second one is shown by the page map and by all views with
`follows_page_map` at the same time.

With a slow or stepped engine, these views thus always show the same state.
"""
_CURVES_SETTLED_NS: Final = 8_000_000_000
"""Time in ns without new data after which heartbeats refresh the views only every `_IDLE_INTERVAL_NS`."""
_IDLE_INTERVAL_NS: Final = 3_000_000_000


class Refresher(QObject):
    def __init__(self, session: Session, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._last_ns: dict[View, int] = {}
        self._dirty: set[View] = set()
        self._slow_after_ns = 0
        self._data_ns = 0
        self._is_single_update = False
        """Whether an update after a pause has not been shown yet."""
        self._heartbeat_ns = 0
        self._updated_ns = 0
        self._is_postponed = False
        self._fast_timer = QTimer(self, singleShot=True, interval=0)
        self._fast_timer.timeout.connect(self._refresh_fast)
        self._slow_timer = QTimer(self, singleShot=True, interval=_TURN_MS)
        self._slow_timer.timeout.connect(self.run)
        session.timeline.shown.connect(self._on_update)
        session.selection.changed.connect(self.touch_all)
        session.timeline.paused_changed.connect(self.touch_all)
        session.timeline.cursor_changed.connect(self.touch_all)
        session.timeline.moved.connect(self.touch_all)  # a paused recording emits no other signal

    def add_view(self, view: View) -> None:
        self._last_ns[view] = 0
        self.touch(view)

    def remove(self, view: View) -> None:
        self._last_ns.pop(view, None)
        self._dirty.discard(view)

    def touch(self, view: View) -> None:
        self._dirty.add(view)
        self._schedule({view: self._wait_ns(view, time.monotonic_ns())})

    def touch_all(self) -> None:
        self._dirty.update(self._last_ns)
        self._refresh_fast()

    def run(self) -> None:
        """Refresh the fast views that are due, or one slow view if it has waited longer than they have."""
        self._is_postponed = not self._is_postponed and time.monotonic_ns() - self._updated_ns < _MIN_GAP_NS
        if self._is_postponed:
            self._slow_timer.start(math.ceil(_MIN_GAP_NS / 1e6))
            return
        waits = self._waits(self._dirty)
        may_refresh_slow = time.monotonic_ns() >= self._slow_after_ns
        due = [view for view in waits if waits[view] <= 0 and (may_refresh_slow or view.refresh_hz >= _FAST_HZ)]
        due.sort(key=lambda view: (self._last_ns[view], view.refresh_hz))
        if due and due[0].refresh_hz < _FAST_HZ:
            self._refresh(due[:1], waits)
        else:
            self._refresh([view for view in due if view.refresh_hz >= _FAST_HZ], waits)

    def _on_update(self, update: Update | None) -> None:
        if self._needs_refresh(update):
            self._updated_ns = time.monotonic_ns()
            self._dirty.update(self._last_ns)
            self._fast_timer.start()  # in a separate turn: applying the update took one already

    def _needs_refresh(self, update: Update | None) -> bool:
        now_ns = time.monotonic_ns()
        if update is None or not update.is_sign_of_life:
            self._is_single_update = self._is_single_update or now_ns - self._data_ns >= _SINGLE_UPDATE_NS
            self._data_ns = now_ns
            return True
        if now_ns - self._data_ns >= _CURVES_SETTLED_NS and now_ns - self._heartbeat_ns < _IDLE_INTERVAL_NS:
            return False
        self._heartbeat_ns = now_ns
        return True

    def _refresh_fast(self) -> None:
        waits = self._waits(self._dirty)
        with_page_map = [view for view in waits if view.follows_page_map and self._is_single_update]
        self._is_single_update = False
        waits.update(dict.fromkeys(with_page_map, 0.0))
        self._refresh([view for view in waits if view.refresh_hz >= _FAST_HZ] + with_page_map, waits)

    def _waits(self, views: Iterable[View]) -> dict[View, float]:
        """Return the ns until each visible view may be refreshed.

        Hidden views are skipped until the next update, or until they become visible, because checking a view's
        visibility takes longer than most refreshes.
        """
        now_ns = time.monotonic_ns()
        visible = [view for view in views if is_on_screen(view)]
        self._dirty.intersection_update(visible)
        return {view: self._wait_ns(view, now_ns) for view in visible}

    def _refresh(self, views: list[View], waits: dict[View, float]) -> None:
        try:
            for view in [view for view in views if waits[view] <= 0]:
                del waits[view]
                self._dirty.discard(view)
                start_ns = self._last_ns[view] = time.monotonic_ns()
                view.refresh()
                if view.refresh_hz < _FAST_HZ:
                    end_ns = time.monotonic_ns()
                    self._slow_after_ns = end_ns + min(_PAUSE_FACTOR * (end_ns - start_ns), _MAX_PAUSE_NS)
        finally:  # an error in one view must not stop the others
            self._schedule(waits)

    def _wait_ns(self, view: View, now_ns: int) -> float:
        grace_ns = _FAST_GRACE_NS if view.refresh_hz >= _FAST_HZ else _GRACE_NS
        return 1e9 / view.refresh_hz - grace_ns - (now_ns - self._last_ns[view])

    def _schedule(self, waits: dict[View, float]) -> None:
        if not waits:
            return
        pause_ns = self._slow_after_ns - time.monotonic_ns()
        wait_ns = min(max(wait, pause_ns if view.refresh_hz < _FAST_HZ else 0) for view, wait in waits.items())
        wait_ms = max(_TURN_MS, math.ceil(wait_ns / 1e6))
        if not self._slow_timer.isActive() or self._slow_timer.remainingTime() > wait_ms:
            self._slow_timer.start(wait_ms)
