"""What the heatmap asks of a session besides what every view does: its course, and a cursor on it."""

from __future__ import annotations

from typing import Protocol, cast

from PySide6.QtCore import SignalInstance

from kvscope_app.session.session import Session
from kvscope_telemetry.summaries.course import Course


class OnTime(Protocol):
    """Times are nanoseconds since 1970, by the clock of the course."""

    course_changed: SignalInstance

    @property
    def course(self) -> Course: ...
    @property
    def cursor_ns(self) -> int: ...
    def go_to(self, time_ns: int) -> object:
        """Show the state at `time_ns`."""


def on_time(session: Session) -> OnTime | None:
    """The session's timeline; None of a session that keeps none."""
    return cast(OnTime, session) if hasattr(session, "course") and hasattr(session, "go_to") else None
