"""What views on time ask of a session, and how they go to a moment and select whom it is about.

Owns the wish to select a request of an engine start that is not shown yet. Knows no view.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import TimedEvent


@runtime_checkable
class TimedSession(Protocol):
    """A session with a timeline. Times are wall clock, ns since 1970, as those of the overview."""

    selected_request: int | None
    overview_changed: Any
    """A signal without arguments."""

    @property
    def overview(self) -> SessionOverview: ...
    @property
    def cursor_ns(self) -> int: ...
    @property
    def timeline_range_ns(self) -> tuple[int, int] | None: ...
    @property
    def mirror(self) -> Mirror: ...
    def go_to(self, time_ns: int) -> None: ...
    def go_live(self) -> None: ...
    def show_event(self, timed: TimedEvent, *, before: bool = False) -> None:
        """Go to the state after an event, or `before` it, and select the request that it happened to."""

    def select_request(self, number: int | None) -> None: ...


class Choice:
    """Goes where a person pointed. A request is selected once the engine start it is of is what is shown."""

    def __init__(self, session: object) -> None:
        self._session = session if isinstance(session, TimedSession) else None
        self._wanted: tuple[int, int] | None = None

    def choose(self, time_ns: int, epoch: int = 0, number: int = 0) -> None:
        """Go to `time_ns`, and select request `number` of `epoch` where there is one."""
        if self._session is None:
            return
        self._wanted = (epoch, number) if number else None
        self._session.go_to(time_ns)
        self.settle()

    def show_event(self, timed: TimedEvent) -> None:
        """Go to the state after an event, and select whom it happened to."""
        if self._session is not None:
            self._wanted = None
            self._session.show_event(timed)

    def settle(self) -> None:
        """What is shown may have become another."""
        if self._wanted is not None and self._session is not None and self._session.mirror.epoch == self._wanted[0]:
            self._session.select_request(self._wanted[1])
            self._wanted = None

    @property
    def selected(self) -> tuple[int, int] | None:
        """Epoch and number of the request that is selected."""
        session = self._session
        if session is None or session.selected_request is None or session.mirror.epoch is None:
            return None
        return session.mirror.epoch, session.selected_request
