"""Evaluates alarm rules on a session's overview, and adds a bookmark for each alarm.

Owns how far the overview was evaluated, and what is posted to the webhook. Alarms of a live session are announced and
stored with the session. Alarms of a recording are computed with the current rules, and recomputed when the rules
change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.session.session import Session
from kvscope_app.settings.settings_store import SettingsStore
from kvscope_telemetry.alarms.alarm_engine import Alarm, AlarmEngine, bookmark_of
from kvscope_telemetry.alarms.expression import Expression
from kvscope_telemetry.alarms.rules import Rule
from kvscope_telemetry.alarms.webhook import Webhook, payload
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.summary import SECOND_NS

_SECONDS_PER_STEP: Final = 50
"""Seconds of the overview evaluated per turn of the event loop; each takes about 0.1 ms."""


class AlarmEvaluator(QObject):
    """Evaluates the rules in `settings` and posts to the webhook there. Does nothing while all rules are off."""

    rang = Signal(object)
    """Emitted with an `Alarm` of the live session that started."""
    over = Signal(object)
    """Emitted with an `Alarm` of the live session that ended."""
    went_on = Signal(object)
    """Emitted with an ongoing `Alarm` of the live session, which has the worst value so far."""
    looked = Signal()
    """Emitted after more seconds were evaluated."""

    def __init__(self, session: Session, settings: SettingsStore, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._session, self.settings = session, settings
        self._own_rules: tuple[Rule, ...] = ()
        self._own_url = ""
        self._webhook: Webhook | None = None
        self._has_shown_failure = False
        self._engine = AlarmEngine(self.rules)
        self._in_use = self.rules
        self._seen_ns = -1
        self._derived: dict[str, Bookmark] = {}
        self._is_following = False
        self._later = QTimer(self, singleShot=True, interval=0)
        self._later.timeout.connect(self._evaluate)
        settings.changed.connect(self._on_settings)
        self._follow_overview()

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the engine; a rule may need figures that the engine does not publish."""
        return self._session.capabilities

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Rules of the command line, then those of the settings. The former replace rules of the same name."""
        names = {rule.name for rule in self._own_rules}
        return (*self._own_rules, *(rule for rule in self.settings.values.alarm_rules if rule.name not in names))

    @property
    def webhook_url(self) -> str:
        """Address that alarms are posted to; empty if they are not posted."""
        return self._own_url or self.settings.values.alarm_webhook

    def use(self, rules: Sequence[Rule], webhook_url: str = "") -> None:
        """Add `rules` for this run only, and replace the webhook of the settings unless `webhook_url` is empty."""
        self._own_rules, self._own_url = tuple(rules), webhook_url
        self._on_settings()

    @property
    def command_line_text(self) -> str:
        """Sentence that lists what was given on the command line for this run, empty if nothing was."""
        parts = [", ".join(rule.name for rule in self._own_rules), "the webhook" if self._own_url else ""]
        given = " and ".join(part for part in parts if part)
        return f"From the command line, for this run: {given}." if given else ""

    def value_of_last_second(self, expression: Expression) -> float:
        """Return the value in the last second that was complete at the time shown; NaN if it is unknown."""
        overview = self._session.overview
        place = overview.index_at(self._session.timeline.cursor_ns + 1 - SECOND_NS)
        return float(expression.value(overview, slice(place, place + 1))[0]) if place >= 0 else math.nan

    def close(self) -> None:
        """Close the webhook, which posts what is already queued and nothing more."""
        if self._webhook is not None:
            self._webhook.close()
            self._webhook = None

    def _on_settings(self, _: object = None) -> None:
        """Switch to the current rules and webhook.

        Live alarms that are ongoing end here; the alarms of a recording are recomputed.
        """
        if self._webhook is not None and self._webhook.url != self.webhook_url:
            self.close()
        if self.rules == self._in_use:
            return
        self._in_use = self.rules
        standing, self._engine = self._engine.active, AlarmEngine(self.rules)
        if self._session.timeline.is_file:
            self._seen_ns = -1
            self._derived.clear()
            self._session.bookmarks.derive(())
        else:
            for alarm in standing:
                self._report(_ended(alarm, self._seen_ns))
        self._follow_overview()

    def _follow_overview(self) -> None:
        wants = not self._engine.is_idle
        if wants and not self._is_following:
            self._session.overview_changed.connect(self._evaluate)
        elif self._is_following and not wants:
            self._session.overview_changed.disconnect(self._evaluate)
        self._is_following = wants
        if wants:
            self._later.start()

    def _evaluate(self) -> None:
        if self._webhook is not None:
            self._report_failure(self._webhook.failure)
        overview = self._session.overview
        first = overview.index_at(self._seen_ns) + 1
        last = min(first + _SECONDS_PER_STEP, len(overview))
        if first >= last or not self._is_following:
            return
        self._seen_ns = int(overview.time_ns[last - 1])
        changed = self._engine.read(overview, first, last)
        standing = self._engine.active
        if self._session.timeline.is_file:
            self._derive([*changed, *standing])
        else:
            for alarm in changed:
                self._report(alarm)
            # Shown but not stored yet: the bookmark stored when the alarm ends has the worst value of all.
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

    def _report(self, alarm: Alarm) -> None:
        self._session.bookmarks.add_revisions([bookmark_of(alarm)])
        (self.over if alarm.until_ns else self.rang).emit(alarm)
        self._post(alarm)

    def _post(self, alarm: Alarm) -> None:
        url = self.webhook_url
        if not url:
            return
        try:
            self._webhook = self._webhook or Webhook(url)
        except BadInput as error:  # the settings may come from another version or have been edited by hand
            self._report_failure(str(error))
            return
        self._webhook.post(payload(alarm, self.capabilities.engine, self._session.source.name))

    def _report_failure(self, failure: str) -> None:
        """Report a webhook failure once, until a post succeeds again."""
        if failure and not self._has_shown_failure:
            self._session.noticed.emit(f"Alarm not posted: {failure}")
        self._has_shown_failure = bool(failure)


def _ended(alarm: Alarm, at_ns: int) -> Alarm:
    return replace(alarm, until_ns=max(at_ns, alarm.rang_ns))
