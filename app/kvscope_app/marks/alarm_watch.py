"""Follows a session's overview with the rules of alarms, and drops a bookmark for each that rings.

Owns how far the overview was looked at, and what is posted to the webhook. Live, alarms are told and kept with the
session; of a recording they are where the rules of now would have rung, and follow the rules when these change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.session.session import Session
from kvscope_app.settings.settings_keeper import SettingsKeeper
from kvscope_telemetry.alarms.alarm_engine import Alarm, AlarmEngine, bookmark_of
from kvscope_telemetry.alarms.expression import Expression
from kvscope_telemetry.alarms.rules import Rule
from kvscope_telemetry.alarms.webhook import Webhook, payload
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.summary import SECOND_NS

_AT_A_TIME: Final = 50
"""Seconds looked at in one turn of the event loop: each takes a tenth of a millisecond or so."""


class AlarmWatch(QObject):
    """By the rules and the webhook of `settings`. With all rules off it does nothing at all."""

    rang = Signal(object)
    """An `Alarm` of the live end."""
    over = Signal(object)
    """The same, over."""
    went_on = Signal(object)
    """An `Alarm` of the live end that goes on, with its worst value so far."""
    looked = Signal()
    """There are new seconds."""

    def __init__(self, session: Session, settings: SettingsKeeper, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._session, self.settings = session, settings
        self._own_rules: tuple[Rule, ...] = ()
        self._own_url = ""
        self._webhook: Webhook | None = None
        self._told_failure = False
        self._engine = AlarmEngine(self.rules)
        self._in_use = self.rules
        self._seen_ns = -1
        self._derived: dict[str, Bookmark] = {}
        self._is_following = False
        self._later = QTimer(self, singleShot=True, interval=0)
        self._later.timeout.connect(self._look)
        settings.changed.connect(self._on_settings)
        self._follow()

    @property
    def capabilities(self) -> Capabilities:
        """What the engine tells: some rules need more than others."""
        return self._session.capabilities

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Those of this run in front of those that are kept, which give way to one of the same name."""
        names = {rule.name for rule in self._own_rules}
        return (*self._own_rules, *(rule for rule in self.settings.values.alarm_rules if rule.name not in names))

    @property
    def webhook_url(self) -> str:
        """Where alarms are posted; empty: nowhere."""
        return self._own_url or self.settings.values.alarm_webhook

    def use(self, rules: Sequence[Rule], webhook_url: str = "") -> None:
        """For this run, beside the rules that are kept and instead of their webhook."""
        self._own_rules, self._own_url = tuple(rules), webhook_url
        self._on_settings()

    @property
    def own_words(self) -> str:
        """What holds for this run alone, in a sentence; empty where nothing does."""
        parts = [", ".join(rule.name for rule in self._own_rules), "the webhook" if self._own_url else ""]
        given = " and ".join(part for part in parts if part)
        return f"From the command line, for this run: {given}." if given else ""

    def value_of_last_second(self, expression: Expression) -> float:
        """Return the value of the last second that was over at the moment that is shown; NaN where it is not known."""
        overview = self._session.overview
        place = overview.place_at(self._session.timeline.cursor_ns + 1 - SECOND_NS)
        return float(expression.value(overview, slice(place, place + 1))[0]) if place >= 0 else math.nan

    def close(self) -> None:
        """Post nothing any more but what waits."""
        if self._webhook is not None:
            self._webhook.close()
            self._webhook = None

    def _on_settings(self, _: object = None) -> None:
        """From now on the rules that there are. What goes on by the old ones ends here."""
        if self._webhook is not None and self._webhook.url != self.webhook_url:
            self.close()
        if self.rules == self._in_use:
            return
        self._in_use = self.rules
        standing, self._engine = self._engine.standing, AlarmEngine(self.rules)
        if self._session.timeline.is_file:
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
            self._session.overview_changed.connect(self._look)
        elif self._is_following and not wants:
            self._session.overview_changed.disconnect(self._look)
        self._is_following = wants
        if wants:
            self._later.start()

    def _look(self) -> None:
        if self._webhook is not None:
            self._tell_failure(self._webhook.failure)
        overview = self._session.overview
        first = overview.place_at(self._seen_ns) + 1
        last = min(first + _AT_A_TIME, len(overview))
        if first >= last or not self._is_following:
            return
        self._seen_ns = int(overview.time_ns[last - 1])
        changed = self._engine.read(overview, first, last)
        standing = self._engine.standing
        if self._session.timeline.is_file:
            self._derive([*changed, *standing])
        else:
            for alarm in changed:
                self._tell(alarm)
            # Shown, but not kept: the bookmark that is kept at the end has the worst value of all.
            self._session.bookmarks.load(bookmark_of(alarm) for alarm in standing)
            for alarm in standing:
                self.went_on.emit(alarm)
        if last < len(overview):
            self._later.start()
        self.looked.emit()

    def _derive(self, alarms: list[Alarm]) -> None:
        for alarm in alarms:
            made = bookmark_of(alarm)
            self._derived[made.bookmark_id] = made
        if alarms:
            self._session.bookmarks.derive(self._derived.values())

    def _tell(self, alarm: Alarm) -> None:
        self._session.bookmarks.say([bookmark_of(alarm)])
        (self.over if alarm.until_ns else self.rang).emit(alarm)
        self._post(alarm)

    def _post(self, alarm: Alarm) -> None:
        url = self.webhook_url
        if not url:
            return
        try:
            self._webhook = self._webhook or Webhook(url)
        except BadInput as error:  # kept by another version, or written by hand
            self._tell_failure(str(error))
            return
        self._webhook.post(payload(alarm, self.capabilities.engine, self._session.source.name))

    def _tell_failure(self, failure: str) -> None:
        """Once, until a post gets through again."""
        if failure and not self._told_failure:
            self._session.noticed.emit(f"Alarm not posted: {failure}")
        self._told_failure = bool(failure)


def _ended(alarm: Alarm, at_ns: int) -> Alarm:
    return replace(alarm, until_ns=max(at_ns, alarm.rang_ns))
