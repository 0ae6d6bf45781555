"""Evaluates alarm rules over the seconds of a session overview, in order.

Owns the state of each rule: since when its condition has held, and the alarm that it fired. An alarm fires once the
rule's expression has held for `Rule.seconds`. It is resolved once the expression has been false for `CALM_S`, even with
thresholds relaxed by `SLACK`, so that a value that fluctuates around a threshold gives one alarm. The rules of an
`AlarmEngine` never change. Reads no clock: the result is the same live and offline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvscope_telemetry.alarms.alarm_figures import value_text
from kvscope_telemetry.alarms.expression import expression_of
from kvscope_telemetry.alarms.rules import Rule, rule_error
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

CALM_S: Final = 10.0
"""Seconds for which an alarm's condition must be false, even with thresholds relaxed by `SLACK`, until the
alarm is resolved.
"""
SLACK: Final = 0.05
"""Fraction of a threshold (0.05: 5 %) by which the threshold of an active alarm is relaxed. While its condition
still holds with the relaxed threshold, the alarm is not resolved.
"""
_MAX_GAP_NS: Final = 2 * SECOND_NS
"""Longest gap in the overview, in ns, over which a condition counts as held without interruption."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm that fired and may have been resolved since. Times are in nanoseconds since 1970, by the
    overview's clock.
    """

    rule: Rule
    epoch: int
    begin_ns: int
    """Start of the first second in which the condition held."""
    fired_ns: int
    """Time at which the alarm fired: end of the first second by which the condition had held for `Rule.seconds`."""
    worst: float
    """Worst value since the condition began to hold, as defined by `Expression.value`."""
    value: float = math.nan
    """Latest value, as defined by `Expression.value`."""
    until_ns: int = 0
    """Time at which the alarm was resolved; 0 while it is active."""

    @property
    def name(self) -> str:
        return self.rule.name


class AlarmEngine:
    """Evaluates rules on the seconds passed to `read`. Rules that are off or invalid are ignored."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = [rule for rule in rules if rule.is_on and not rule_error(rule)]
        self._states = [_RuleState(rule) for rule in self._rules]
        self._epoch: int | None = None
        self._last_ns = 0

    @property
    def is_idle(self) -> bool:
        return not self._rules

    @property
    def active(self) -> list[Alarm]:
        return [state.alarm for state in self._states if state.alarm is not None]

    def read(self, overview: SessionOverview, first: int, last: int) -> list[Alarm]:
        """Evaluate the rules on rows `first` to `last` - 1 of the overview, which must follow those of the previous
        call.

        Returns the alarms that fired and those that were resolved (with `until_ns`) in these seconds, in order of time.
        A new engine start (epoch) resolves all active alarms; a gap of more than two seconds resets the time for which
        conditions have held.
        """
        changed: list[Alarm] = []
        rows = slice(first, last)
        columns = [state.columns(overview, rows) for state in self._states]
        begins_ns = overview.time_ns[rows]
        is_stopped = overview.stops.running_between(begins_ns, begins_ns + SECOND_NS) < SECOND_NS
        seconds = zip(begins_ns.tolist(), overview.epoch[rows].tolist(), is_stopped.tolist(), strict=True)
        for row, (time_ns, epoch, stopped) in enumerate(seconds):
            changed += self._advance_to(time_ns, epoch)
            for state, column in zip(self._states, columns, strict=True):
                alarm = state.feed(time_ns, epoch, column[row], is_stopped=stopped)
                if alarm is not None:
                    changed.append(alarm)
        return changed

    def _advance_to(self, time_ns: int, epoch: int) -> list[Alarm]:
        """Advance to the next second. If that second belongs to another engine start, returns the active
        alarms, which are then resolved.
        """
        ended: list[Alarm] = []
        if epoch != self._epoch:
            ended = [replace(alarm, until_ns=self._last_ns) for alarm in self.active]
            self._epoch = epoch
            self._states = [_RuleState(rule) for rule in self._rules]
        elif time_ns - self._last_ns > _MAX_GAP_NS:
            for state in self._states:
                state.reset_times()
        self._last_ns = time_ns + SECOND_NS
        return ended


class _RuleState:
    def __init__(self, rule: Rule) -> None:
        self.alarm: Alarm | None = None
        self._rule, self._expression = rule, expression_of(rule.expression)
        self._since_ns: int | None = None
        self._calm_since_ns: int | None = None
        self._worst = math.nan

    def columns(self, overview: SessionOverview, rows: slice) -> list[tuple[float, float, float]]:
        """Return three numbers for each second: whether the condition holds, whether it holds with thresholds relaxed
        by `SLACK` (each 1, 0, or NaN if unknown), and the value that the condition compares.

        If no alarm is active and the condition holds in no second, the second number is always 0.0 and the third NaN,
        because they are not needed.
        """
        expression = self._expression
        is_true = expression.evaluate(overview, rows)
        if self.alarm is None and not (is_true == 1).any():
            return [(each, 0.0, math.nan) for each in is_true.tolist()]
        parts = is_true, expression.evaluate(overview, rows, SLACK), expression.value(overview, rows)
        return list(zip(*(part.tolist() for part in parts), strict=True))

    def reset_times(self) -> None:
        self._since_ns = self._calm_since_ns = None

    def feed(self, time_ns: int, epoch: int, second: tuple[float, float, float], *, is_stopped: bool) -> Alarm | None:
        """Evaluate the next second. Returns the alarm if it fired or was resolved in this second, otherwise None."""
        is_true, holds_with_slack, value = second
        if math.isnan(is_true):
            if is_stopped:
                self.reset_times()
            return None
        end_ns = time_ns + SECOND_NS
        self._record(time_ns, value, is_true=bool(is_true), is_calm=holds_with_slack == 0)
        if self.alarm is not None:
            return self._extend(self.alarm, value, end_ns)
        if self._since_ns is None or end_ns - self._since_ns < self._rule.seconds * SECOND_NS:
            return None
        self.alarm = Alarm(self._rule, epoch, self._since_ns, end_ns, self._worst, value)
        return self.alarm

    def _extend(self, alarm: Alarm, value: float, end_ns: int) -> Alarm | None:
        since_ns = self._calm_since_ns
        self.alarm = alarm = replace(alarm, worst=self._worst, value=value)
        if since_ns is None or end_ns - since_ns < CALM_S * SECOND_NS:
            return None
        self.alarm = None
        return replace(alarm, until_ns=since_ns)

    def _record(self, time_ns: int, value: float, *, is_true: bool, is_calm: bool) -> None:
        if is_true:
            is_new = self._since_ns is None and self.alarm is None
            worse = np.fmax if self._expression.rises else np.fmin
            self._worst = value if is_new else float(worse(self._worst, value))
            self._since_ns = time_ns if self._since_ns is None else self._since_ns
        else:
            self._since_ns = None
        if not is_calm:
            self._calm_since_ns = None
        elif self._calm_since_ns is None:
            self._calm_since_ns = time_ns


def alarm_text(alarm: Alarm) -> str:
    """Describe the alarm's worst value, such as `up to 97.0 %`; empty if no value is known."""
    if not math.isfinite(alarm.worst):
        return ""
    expression = expression_of(alarm.rule.expression)
    return f"{'up' if expression.rises else 'down'} to {value_text(alarm.worst, expression.unit)}"


def bookmark_of(alarm: Alarm) -> Bookmark:
    """Return a bookmark for the alarm.

    The id is derived from rule, epoch and start, so the same alarm gets the same bookmark live and offline. The
    bookmark of a resolved alarm has revision 1 and replaces that of the active alarm (revision 0).
    """
    return Bookmark(
        bookmark_id=f"{alarm.name}-{alarm.epoch:x}-{alarm.begin_ns:x}",
        time_ns=alarm.begin_ns,
        until_ns=alarm.until_ns,
        kind=alarm.name,
        text=alarm_text(alarm),
        revision=1 if alarm.until_ns else 0,
    )
