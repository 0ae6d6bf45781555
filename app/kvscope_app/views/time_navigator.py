"""Navigation from views with a time axis: go to a time and select its request.

If the chosen request belongs to an epoch (start of an engine) that is not shown yet, this module remembers the request
and selects it later. Must not depend on any view.
"""

from __future__ import annotations

from kvscope_app.session.session import Session
from kvscope_telemetry.summaries.summary import TimedEvent


class TimeNavigator:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._pending: tuple[int, int] | None = None

    def choose(self, time_ns: int, epoch: int = 0, number: int = 0) -> None:
        """Go to `time_ns`. If `number` is not 0, select request `number` of `epoch` (the start of its engine)
        once that epoch is shown.
        """
        self._pending = (epoch, number) if number else None
        self._session.timeline.go_to(time_ns)
        self.select_pending()

    def show_event(self, timed: TimedEvent) -> None:
        """Go to the state after event `timed`. The session selects the event's request."""
        self._pending = None
        self._session.timeline.show_event(timed)

    def select_pending(self) -> None:
        """Select the pending request if its epoch is shown. Call this after the shown state changed."""
        if self._pending is not None and self._session.mirror.epoch == self._pending[0]:
            self._session.selection.select_request(self._pending[1])
            self._pending = None

    @property
    def selected(self) -> tuple[int, int] | None:
        session = self._session
        if session.selection.request is None or session.mirror.epoch is None:
            return None
        return session.mirror.epoch, session.selection.request
