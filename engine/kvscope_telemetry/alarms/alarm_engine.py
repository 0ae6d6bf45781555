"""Rings alarms: reads the seconds of an overview in order, by rules that do not change meanwhile.

Owns which rule holds since when. One trouble is one alarm: it rings once its expression has held for its seconds, and
is over once it clearly has not for some more. Knows no clock: live and offline are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvscope_telemetry.alarms.expression import expression_of
from kvscope_telemetry.alarms.figures import value_text
from kvscope_telemetry.alarms.rules import Rule, complaint
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

CALM_S: Final = 10.0
"""How long it must not hold until it is over."""
SLACK: Final = 0.05
"""How far from its thresholds it must be by then: what goes up and down around one is one trouble."""
_LARGEST_GAP_NS: Final = 2 * SECOND_NS
"""Of seconds that were not told nothing is known: what held before need not have held meanwhile."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm, from when its rule rang. Times are the overview's: ns since 1970."""

    rule: Rule
    epoch: int
    begin_ns: int
    """When it began."""
    rang_ns: int
    """When it had lasted long enough."""
    worst: float
    """What is held against the first threshold, at its worst so far."""
    value: float = math.nan
    """The same as it is now."""
    until_ns: int = 0
    """When it was over; 0 while it goes on."""

    @property
    def name(self) -> str:
        """The name of its rule."""
        return self.rule.name


class AlarmEngine:
    """Judges the seconds of an overview that are given to `read`; rules that are off or invalid cost nothing."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = [rule for rule in rules if rule.is_on and not complaint(rule)]
        self._watches = [_Watch(rule) for rule in self._rules]
        self._epoch: int | None = None
        self._last_ns = 0

    @property
    def is_idle(self) -> bool:
        """Whether no rule is on."""
        return not self._rules

    @property
    def standing(self) -> list[Alarm]:
        """The alarms that have not ended."""
        return [watch.alarm for watch in self._watches if watch.alarm is not None]

    def read(self, overview: SessionOverview, first: int, last: int) -> list[Alarm]:
        """Read the seconds at the places from `first` until before `last`, which follow those of the last call; returns
        alarms that rang in them and alarms that ended in them (with `until_ns`).
        """
        changed: list[Alarm] = []
        rows = slice(first, last)
        columns = [watch.columns(overview, rows) for watch in self._watches]
        begins_ns = overview.time_ns[rows]
        is_stopped = overview.stops.running_between(begins_ns, begins_ns + SECOND_NS) < SECOND_NS
        seconds = zip(begins_ns.tolist(), overview.epoch[rows].tolist(), is_stopped.tolist(), strict=True)
        for place, (time_ns, epoch, stopped) in enumerate(seconds):
            changed += self._turn_to(time_ns, epoch)
            for watch, column in zip(self._watches, columns, strict=True):
                alarm = watch.feed(time_ns, epoch, column[place], is_stopped=stopped)
                if alarm is not None:
                    changed.append(alarm)
        return changed

    def _turn_to(self, time_ns: int, epoch: int) -> list[Alarm]:
        """What the next second ends by being of another engine start."""
        ended: list[Alarm] = []
        if epoch != self._epoch:
            ended = [replace(alarm, until_ns=self._last_ns) for alarm in self.standing]
            self._epoch = epoch
            self._watches = [_Watch(rule) for rule in self._rules]
        elif time_ns - self._last_ns > _LARGEST_GAP_NS:
            for watch in self._watches:
                watch.lose_track()
        self._last_ns = time_ns + SECOND_NS
        return ended


class _Watch:
    """One rule in one engine start."""

    def __init__(self, rule: Rule) -> None:
        self.alarm: Alarm | None = None
        self._rule, self._expression = rule, expression_of(rule.expression)
        self._since_ns: int | None = None
        self._calm_since_ns: int | None = None
        self._worst = math.nan

    def columns(self, overview: SessionOverview, rows: slice) -> list[tuple[float, float, float]]:
        """Of each second whether it holds, whether it does with slack, and its value; the last two are read where
        there is a trouble."""
        expression = self._expression
        holds = expression.holds(overview, rows)
        if self.alarm is None and not (holds == 1).any():
            return [(each, 0.0, math.nan) for each in holds.tolist()]
        parts = holds, expression.holds(overview, rows, SLACK), expression.value(overview, rows)
        return list(zip(*(part.tolist() for part in parts), strict=True))

    def lose_track(self) -> None:
        """Seconds are missing."""
        self._since_ns = self._calm_since_ns = None

    def feed(self, time_ns: int, epoch: int, second: tuple[float, float, float], *, is_stopped: bool) -> Alarm | None:
        """The next second; the alarm, where it rang or was over by it."""
        holds, nearly_holds, value = second
        if math.isnan(holds):
            if is_stopped:
                self.lose_track()
            return None
        end_ns = time_ns + SECOND_NS
        self._note(time_ns, value, holds=bool(holds), is_calm=nearly_holds == 0)
        if self.alarm is not None:
            return self._go_on(self.alarm, value, end_ns)
        if self._since_ns is None or end_ns - self._since_ns < self._rule.seconds * SECOND_NS:
            return None
        self.alarm = Alarm(self._rule, epoch, self._since_ns, end_ns, self._worst, value)
        return self.alarm

    def _go_on(self, alarm: Alarm, value: float, end_ns: int) -> Alarm | None:
        since_ns = self._calm_since_ns
        self.alarm = alarm = replace(alarm, worst=self._worst, value=value)
        if since_ns is None or end_ns - since_ns < CALM_S * SECOND_NS:
            return None
        self.alarm = None
        return replace(alarm, until_ns=since_ns)

    def _note(self, time_ns: int, value: float, *, holds: bool, is_calm: bool) -> None:
        if holds:
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
    """Describe the alarm's worst value: `up to 97.0 %`."""
    if not math.isfinite(alarm.worst):
        return ""
    expression = expression_of(alarm.rule.expression)
    return f"{'up' if expression.rises else 'down'} to {value_text(alarm.worst, expression.unit)}"


def bookmark_of(alarm: Alarm) -> Bookmark:
    """Return the alarm's bookmark. The same alarm has the same bookmark wherever it rings; a later revision says how it
    ended.
    """
    return Bookmark(
        bookmark_id=f"{alarm.name}-{alarm.epoch:x}-{alarm.begin_ns:x}",
        time_ns=alarm.begin_ns,
        until_ns=alarm.until_ns,
        kind=alarm.name,
        text=alarm_text(alarm),
        revision=1 if alarm.until_ns else 0,
    )
