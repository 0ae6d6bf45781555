"""Refreshes the views: each about `refresh_hz` times a second at most, only while it is seen and something changed.

The page map follows every update, which `session/pace.py` takes at most each 16 ms.

An engine that does nothing still gives signs of life. They move the curves' time alone: views follow them at leisure.

A turn of the event loop is kept short, or keys would wait: a turn refreshes the fast view alone, or one of the others,
and what one has to paint is painted before the next has its turn. The others have a share of the time at most: where a
machine is slow, or busy with something else, they come more seldom, and the fast view and keys as before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Final

from PySide6.QtCore import QObject, QTimer

from kvscope_app.session.session import Session
from kvscope_app.views.base import View
from kvscope_app.views.in_sight import in_sight
from kvscope_telemetry.source import Update

_FAST_HZ: Final = 50.0
"""Views from this rate on are refreshed with every update, the others one after another, between updates."""
_GRACE_NS: Final = 8_000_000
_FAST_GRACE_NS: Final = 12_000_000
"""So much sooner than its rate says a view may be refreshed. Updates come every 16 ms: the one after a late one comes
sooner, and is not kept waiting until it has no frame of its own."""
_TURN_MS: Final = 8
_APART_NS: Final = 2_000_000
"""A turn that comes so soon after an update was taken in is put off once: late timers are served in one go."""
_PAUSES: Final = 3
"""After one of the others so many times as long as it took none of them has its turn: they get a quarter at most."""
_LONGEST_PAUSE_NS: Final = 500_000_000
_ALONE_NS: Final = 100_000_000
"""News that come so long after the last are shown by views in step with the page map in its turn, whatever their
rate: who steps through an engine, or watches a slow one, reads one moment everywhere."""
_SETTLED_NS: Final = 8_000_000_000
"""So long after the last news the curves have come to rest."""
_LEISURE_NS: Final = 3_000_000_000
"""How often views are refreshed from then on, for signs of life alone."""


class Refresher(QObject):
    """Refreshes `views` of one session."""

    def __init__(self, session: Session, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._last_ns: dict[View, int] = {}
        self._dirty: set[View] = set()
        self._rested_ns = 0
        """When one of the slow views may have its turn again."""
        self._news_ns = 0
        self._is_alone = False
        """Whether news have come that came alone, and are not shown yet."""
        self._sign_ns = 0
        self._fed_ns = 0
        """When an update was taken in."""
        self._is_put_off = False
        self._soon = QTimer(self, singleShot=True, interval=0)
        self._soon.timeout.connect(self._refresh_fast)
        self._later = QTimer(self, singleShot=True, interval=_TURN_MS)
        self._later.timeout.connect(self.run)
        session.timeline.shown.connect(self._on_update)
        session.selection_changed.connect(self.touch_all)
        session.timeline.paused_changed.connect(self.touch_all)
        session.timeline.cursor_changed.connect(self.touch_all)
        session.timeline.moved.connect(self.touch_all)  # a recording that is paused tells nothing else

    def add_view(self, view: View) -> None:
        """Refresh this view from now on."""
        self._last_ns[view] = 0
        self.touch(view)

    def remove(self, view: View) -> None:
        """No more."""
        self._last_ns.pop(view, None)
        self._dirty.discard(view)

    def touch(self, view: View) -> None:
        """Something this view shows may have changed."""
        self._dirty.add(view)
        self._schedule({view: self._wait_ns(view, time.monotonic_ns())})

    def touch_all(self) -> None:
        """Something every view shows may have changed."""
        self._dirty.update(self._last_ns)
        self._refresh_fast()

    def run(self) -> None:
        """Refresh what is due: the fast ones, or one of the others, whoever waited longer."""
        self._is_put_off = not self._is_put_off and time.monotonic_ns() - self._fed_ns < _APART_NS
        if self._is_put_off:
            self._later.start(math.ceil(_APART_NS / 1e6))
            return
        waits = self._waits(self._dirty)
        is_rested = time.monotonic_ns() >= self._rested_ns
        due = [view for view in waits if waits[view] <= 0 and (is_rested or view.refresh_hz >= _FAST_HZ)]
        due.sort(key=lambda view: (self._last_ns[view], view.refresh_hz))
        if due and due[0].refresh_hz < _FAST_HZ:
            self._refresh(due[:1], waits)
        else:
            self._refresh([view for view in due if view.refresh_hz >= _FAST_HZ], waits)

    def _on_update(self, update: Update | None) -> None:
        if self._is_worth_it(update):
            self._fed_ns = time.monotonic_ns()
            self._dirty.update(self._last_ns)
            self._soon.start()  # in a turn of its own: taking the update in was one

    def _is_worth_it(self, update: Update | None) -> bool:
        now_ns = time.monotonic_ns()
        if update is None or not update.is_sign_of_life:
            self._is_alone = self._is_alone or now_ns - self._news_ns >= _ALONE_NS
            self._news_ns = now_ns
            return True
        if now_ns - self._news_ns >= _SETTLED_NS and now_ns - self._sign_ns < _LEISURE_NS:
            return False
        self._sign_ns = now_ns
        return True

    def _refresh_fast(self) -> None:
        waits = self._waits(self._dirty)
        in_step = [view for view in waits if view.in_step and self._is_alone]
        self._is_alone = False
        waits.update(dict.fromkeys(in_step, 0.0))
        self._refresh([view for view in waits if view.refresh_hz >= _FAST_HZ] + in_step, waits)

    def _waits(self, views: Iterable[View]) -> dict[View, float]:
        """Of those in sight: until each may be refreshed, ns. The others are not asked again before the next update, or
        before they come in sight: to ask costs more than most refreshes."""
        now_ns = time.monotonic_ns()
        seen = [view for view in views if in_sight(view)]
        self._dirty.intersection_update(seen)
        return {view: self._wait_ns(view, now_ns) for view in seen}

    def _refresh(self, views: list[View], waits: dict[View, float]) -> None:
        """Those of `views` that are due, and come back for the rest of `waits`."""
        try:
            for view in [view for view in views if waits[view] <= 0]:
                del waits[view]
                self._dirty.discard(view)
                began_ns = self._last_ns[view] = time.monotonic_ns()
                view.refresh()
                if view.refresh_hz < _FAST_HZ:
                    ended_ns = time.monotonic_ns()
                    self._rested_ns = ended_ns + min(_PAUSES * (ended_ns - began_ns), _LONGEST_PAUSE_NS)
        finally:  # one view's error leaves the others their turns
            self._schedule(waits)

    def _wait_ns(self, view: View, now_ns: int) -> float:
        """Until the view may be refreshed again."""
        grace_ns = _FAST_GRACE_NS if view.refresh_hz >= _FAST_HZ else _GRACE_NS
        return 1e9 / view.refresh_hz - grace_ns - (now_ns - self._last_ns[view])

    def _schedule(self, waits: dict[View, float]) -> None:
        """Come back when the first of those that wait is due, and not before."""
        if not waits:
            return
        rest_ns = self._rested_ns - time.monotonic_ns()
        wait_ns = min(max(wait, rest_ns if view.refresh_hz < _FAST_HZ else 0) for view, wait in waits.items())
        wait_ms = max(_TURN_MS, math.ceil(wait_ns / 1e6))
        if not self._later.isActive() or self._later.remainingTime() > wait_ms:
            self._later.start(wait_ms)
