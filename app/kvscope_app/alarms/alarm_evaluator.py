"""Evaluates alarm rules on a session's overview, and adds a bookmark for each alarm.

Owns the time up to which the overview was evaluated, and the webhook. Alarms of a live session are announced and stored
with the session. Alarms of a recording are computed with the current rules, and recomputed when the rules change.
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
"""Seconds of the overview evaluated per turn of the event loop. One second takes about 0.1 ms."""


class AlarmEvaluator(QObject):
    """Evaluates the rules in `settings` and posts alarms to the webhook there. Does nothing while all rules are off."""

    alarm_started = Signal(object)
    """Emitted with the `Alarm` when an alarm of the live session starts."""
    alarm_ended = Signal(object)
    """Emitted with the `Alarm` when an alarm of the live session ends."""
    alarm_updated = Signal(object)
    """Emitted with an ongoing `Alarm` of the live session when the worst value of the alarm has changed."""
    evaluated = Signal()

    def __init__(self, session: Session, settings: SettingsStore, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._session, self.settings = session, settings
        self._run_rules: tuple[Rule, ...] = ()
        self._run_url = ""
        self._webhook: Webhook | None = None
        self._has_shown_failure = False
        self._engine = AlarmEngine(self.rules)
        self._rules_in_use = self.rules
        self._evaluated_ns = -1
        self._derived_bookmarks: dict[str, Bookmark] = {}
        self._is_connected = False
        self._evaluation_timer = QTimer(self, singleShot=True, interval=0)
        self._evaluation_timer.timeout.connect(self._evaluate)
        settings.changed.connect(self._on_settings)
        self._connect_overview()

    @property
    def capabilities(self) -> Capabilities:
        return self._session.capabilities

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Rules given on the command line, followed by the saved rules. A saved rule with the name of a given
        one is left out.
        """
        names = {rule.name for rule in self._run_rules}
        return (*self._run_rules, *(rule for rule in self.settings.values.alarm_rules if rule.name not in names))

    @property
    def webhook_url(self) -> str:
        """URL that alarms are posted to, or "" if alarms are not posted."""
        return self._run_url or self.settings.values.alarm_webhook

    def set_run_rules(self, rules: Sequence[Rule], webhook_url: str = "") -> None:
        """Set rules that apply for this run only, in addition to the saved ones, and a webhook URL that replaces the
        saved one.

        An empty `webhook_url` keeps the saved one.
        """
        self._run_rules, self._run_url = tuple(rules), webhook_url
        self._on_settings()

    @property
    def command_line_text(self) -> str:
        """Sentence that lists the rules and the webhook given on the command line; empty if there are none."""
        parts = [", ".join(rule.name for rule in self._run_rules), "the webhook" if self._run_url else ""]
        text = " and ".join(part for part in parts if part)
        return f"From the command line, for this run: {text}." if text else ""

    def value_of_last_second(self, expression: Expression) -> float:
        """Return the expression's value in the last complete second before the time shown; NaN if unknown."""
        overview = self._session.overview
        index = overview.index_at(self._session.timeline.cursor_ns + 1 - SECOND_NS)
        return float(expression.value(overview, slice(index, index + 1))[0]) if index >= 0 else math.nan

    def close(self) -> None:
        """Close the webhook. Alarms already queued are still posted."""
        if self._webhook is not None:
            self._webhook.close()
            self._webhook = None

    def _on_settings(self, _: object = None) -> None:
        """Switch to the current rules and webhook.

        Ongoing live alarms end; the alarms of a recording are recomputed.
        """
        if self._webhook is not None and self._webhook.url != self.webhook_url:
            self.close()
        if self.rules == self._rules_in_use:
            return
        self._rules_in_use = self.rules
        ongoing, self._engine = self._engine.active, AlarmEngine(self.rules)
        if self._session.timeline.is_file:
            self._evaluated_ns = -1
            self._derived_bookmarks.clear()
            self._session.bookmarks.set_derived(())
        else:
            for alarm in ongoing:
                self._report(_end_alarm(alarm, self._evaluated_ns))
        self._connect_overview()

    def _connect_overview(self) -> None:
        has_rules = not self._engine.is_idle
        if has_rules and not self._is_connected:
            self._session.overview_changed.connect(self._evaluate)
        elif self._is_connected and not has_rules:
            self._session.overview_changed.disconnect(self._evaluate)
        self._is_connected = has_rules
        if has_rules:
            self._evaluation_timer.start()

    def _evaluate(self) -> None:
        if self._webhook is not None:
            self._report_failure(self._webhook.failure)
        overview = self._session.overview
        first = overview.index_at(self._evaluated_ns) + 1
        last = min(first + _SECONDS_PER_STEP, len(overview))
        if first >= last or not self._is_connected:
            return
        self._evaluated_ns = int(overview.time_ns[last - 1])
        changed = self._engine.read(overview, first, last)
        ongoing = self._engine.active
        if self._session.timeline.is_file:
            self._derive_bookmarks([*changed, *ongoing])
        else:
            for alarm in changed:
                self._report(alarm)
            # Shown but not stored yet: the bookmark stored when the alarm ends has the worst value of all.
            self._session.bookmarks.load(bookmark_of(alarm) for alarm in ongoing)
            for alarm in ongoing:
                self.alarm_updated.emit(alarm)
        if last < len(overview):
            self._evaluation_timer.start()
        self.evaluated.emit()

    def _derive_bookmarks(self, alarms: list[Alarm]) -> None:
        for alarm in alarms:
            bookmark = bookmark_of(alarm)
            self._derived_bookmarks[bookmark.bookmark_id] = bookmark
        if alarms:
            self._session.bookmarks.set_derived(self._derived_bookmarks.values())

    def _report(self, alarm: Alarm) -> None:
        self._session.bookmarks.add_revisions([bookmark_of(alarm)])
        (self.alarm_ended if alarm.until_ns else self.alarm_started).emit(alarm)
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
        """Report that an alarm could not be posted, unless the previous post failed too."""
        if failure and not self._has_shown_failure:
            self._session.noticed.emit(f"Alarm not posted: {failure}")
        self._has_shown_failure = bool(failure)


def _end_alarm(alarm: Alarm, at_ns: int) -> Alarm:
    return replace(alarm, until_ns=max(at_ns, alarm.fired_ns))
