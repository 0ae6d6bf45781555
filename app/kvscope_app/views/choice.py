"""How views on time go to a moment and select whom it is about.

Owns the wish to select a request of an engine start that is not shown yet. Knows no view.
"""

from __future__ import annotations

from kvscope_app.session.session import Session
from kvscope_telemetry.summaries.summary import TimedEvent


class Choice:
    """Goes where a person pointed. A request is selected once the engine start it is of is what is shown."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._wanted: tuple[int, int] | None = None

    def choose(self, time_ns: int, epoch: int = 0, number: int = 0) -> None:
        """Go to `time_ns`, and select request `number` of `epoch` where there is one."""
        self._wanted = (epoch, number) if number else None
        self._session.timeline.go_to(time_ns)
        self.settle()

    def show_event(self, timed: TimedEvent) -> None:
        """Go to the state after an event; the session selects whom it happened to."""
        self._wanted = None
        self._session.timeline.show_event(timed)

    def settle(self) -> None:
        """What is shown may have become another."""
        if self._wanted is not None and self._session.mirror.epoch == self._wanted[0]:
            self._session.select_request(self._wanted[1])
            self._wanted = None

    @property
    def selected(self) -> tuple[int, int] | None:
        """Epoch and number of the request that is selected."""
        session = self._session
        if session.selected_request is None or session.mirror.epoch is None:
            return None
        return session.mirror.epoch, session.selected_request
