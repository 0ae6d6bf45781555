"""Follows a session's course with the rules of alarms, and drops a bookmark for each that rings.

Owns the rules of one window and how far the course was looked at. Live, alarms are told and kept with the session; of a
recording they are where the rules of now would have rung, and follow the rules when these change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from PySide6.QtCore import QObject, QSettings, QTimer, Signal

from kvscope_app.session.session import Session
from kvscope_app.setting_names import ALARM_RULES
from kvscope_telemetry.alarms.alarm_engine import Alarm, AlarmEngine
from kvscope_telemetry.alarms.rules import Rule, decode_rules, encode_rules
from kvscope_telemetry.alarms.seconds import seconds_of
from kvscope_telemetry.alarms.words import bookmark_of
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.summaries.bookmark import Bookmark

_AT_A_TIME: Final = 50
"""Seconds looked at in one turn of the event loop: each takes a tenth of a millisecond or so."""


class AlarmWatch(QObject):
    """With all rules off it does nothing at all."""

    rang = Signal(object)
    """An `Alarm` of the live end."""
    over = Signal(object)
    """The same, over."""

    def __init__(self, session: Session, settings: QSettings, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._session, self._settings = session, settings
        self.rules = decode_rules(str(settings.value(ALARM_RULES) or ""))
        self._engine = AlarmEngine(self.rules)
        self._seen_ns = -1
        self._derived: dict[str, Bookmark] = {}
        self._is_following = False
        self._later = QTimer(self, singleShot=True, interval=0)
        self._later.timeout.connect(self._look)
        self._follow()

    @property
    def capabilities(self) -> Capabilities:
        """What the engine tells: some rules need more than others."""
        return self._session.capabilities

    def set_rules(self, rules: tuple[Rule, ...]) -> None:
        """From now on these, and in windows that are opened later. What goes on by the old ones ends here."""
        self._settings.setValue(ALARM_RULES, encode_rules(rules))
        if rules == self.rules:
            return
        self.rules = rules
        standing, self._engine = self._engine.standing, AlarmEngine(rules)
        if self._session.is_file:
            self._seen_ns = -1
            self._derived.clear()
            self._session.bookmarks.derive(())
        else:
            for alarm in standing:
                self._tell(_ended(alarm, self._seen_ns))
        self._follow()

    def _follow(self) -> None:
        wants = not self._engine.is_idle
        if wants and not self._is_following:
            self._session.course_changed.connect(self._look)
        elif self._is_following and not wants:
            self._session.course_changed.disconnect(self._look)
        self._is_following = wants
        if wants:
            self._later.start()

    def _look(self) -> None:
        course = self._session.course
        first = course.place_at(self._seen_ns) + 1
        last = min(first + _AT_A_TIME, len(course))
        if first >= last or not self._is_following:
            return
        self._seen_ns = int(course.time_ns[last - 1])
        changed = [alarm for second in seconds_of(course, first, last) for alarm in self._engine.feed(second)]
        if self._session.is_file:
            self._derive(changed)
        else:
            for alarm in changed:
                self._tell(alarm)
        if last < len(course):
            self._later.start()

    def _derive(self, changed: list[Alarm]) -> None:
        for alarm in changed:
            made = bookmark_of(alarm)
            self._derived[made.bookmark_id] = made
        if changed:
            self._session.bookmarks.derive(self._derived.values())

    def _tell(self, alarm: Alarm) -> None:
        self._session.bookmarks.say([bookmark_of(alarm)])
        (self.over if alarm.until_ns else self.rang).emit(alarm)


def _ended(alarm: Alarm, at_ns: int) -> Alarm:
    return replace(alarm, until_ns=max(at_ns, alarm.rang_ns))
