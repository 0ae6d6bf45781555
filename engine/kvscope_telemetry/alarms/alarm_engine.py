"""Rings alarms: fed with each second of a session in order, by rules that do not change meanwhile.

Owns what is over its threshold since when. One trouble is one alarm: it rings once it has been over the threshold for
its seconds, and is over once it was clearly below for some more. Knows no clock: live and offline are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from kvscope_telemetry.alarms.measures import measure_of
from kvscope_telemetry.alarms.rules import FRAMES_LOST, KINDS, PREEMPTIONS, Rule
from kvscope_telemetry.alarms.seconds import Second
from kvscope_telemetry.summaries.summary import SECOND_NS

_LARGEST_GAP_NS: Final = 2 * SECOND_NS
"""Of seconds that were not told nothing is known: what was over before need not have been so meanwhile."""
_OVER_ITS_SECONDS: Final = (PREEMPTIONS, FRAMES_LOST)
"""Their measure is over `Rule.seconds` already."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One trouble. Times are the course's: ns since 1970."""

    rule: Rule
    epoch: int
    begin_ns: int
    """When it began."""
    rang_ns: int
    """When it had lasted long enough."""
    worst: float
    """The measure at its worst, as far as it went."""
    until_ns: int = 0
    """When it was over; 0 while it goes on."""

    @property
    def kind(self) -> str:
        """Of its rule."""
        return self.rule.kind


class AlarmEngine:
    """Give `feed` the seconds; rules that are off cost nothing."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = [rule for rule in rules if rule.is_on]
        self._epoch: int | None = None
        self._last_ns = 0
        self._watches: list[_Watch] = []

    @property
    def is_idle(self) -> bool:
        """Whether no rule is on."""
        return not self._rules

    @property
    def standing(self) -> list[Alarm]:
        """Those that go on."""
        return [watch.alarm for watch in self._watches if watch.alarm is not None]

    def feed(self, second: Second) -> list[Alarm]:
        """The next one; alarms that rang by it, and those that are over by it (with `until_ns`)."""
        changed: list[Alarm] = []
        if second.epoch != self._epoch:
            changed = [replace(alarm, until_ns=self._last_ns) for alarm in self.standing]
            self._epoch = second.epoch
            self._watches = [_Watch(rule) for rule in self._rules]
        elif second.time_ns - self._last_ns > _LARGEST_GAP_NS:
            for watch in self._watches:
                watch.lose_track()
        self._last_ns = second.time_ns + SECOND_NS
        for watch in self._watches:
            alarm = watch.feed(second)
            if alarm is not None:
                changed.append(alarm)
        return changed


class _Watch:
    """One rule in one engine start."""

    def __init__(self, rule: Rule) -> None:
        self.alarm: Alarm | None = None
        self._rule, self._kind = rule, KINDS[rule.kind]
        self._measure = measure_of(rule)
        self._hold_ns = 0 if rule.kind in _OVER_ITS_SECONDS else round(rule.seconds * SECOND_NS)
        self._over_since_ns: int | None = None
        self._calm_since_ns: int | None = None
        self._worst = 0.0

    def lose_track(self) -> None:
        """Seconds are missing."""
        self._over_since_ns = self._calm_since_ns = None

    def feed(self, second: Second) -> Alarm | None:
        value, end_ns = self._measure(second), second.time_ns + SECOND_NS
        if math.isnan(value):
            if second.stopped_s:
                self.lose_track()
            return None
        self._note(value, second.time_ns)
        if self.alarm is not None:
            return self._go_on(self.alarm, end_ns)
        since_ns = self._over_since_ns
        if since_ns is None or end_ns - since_ns < self._hold_ns:
            return None
        self.alarm = Alarm(self._rule, second.epoch, since_ns, end_ns, self._worst)
        return self.alarm

    def _go_on(self, alarm: Alarm, end_ns: int) -> Alarm | None:
        since_ns = self._calm_since_ns
        self.alarm = alarm = replace(alarm, worst=self._worst)
        if since_ns is None or end_ns - since_ns < self._kind.calm_s * SECOND_NS:
            return None
        self.alarm = None
        return replace(alarm, until_ns=since_ns)

    def _note(self, value: float, time_ns: int) -> None:
        threshold, clears_at = self._rule.threshold, self._rule.threshold * self._kind.clears_at
        is_over = value < threshold if self._kind.is_below else value > threshold
        is_calm = value >= clears_at if self._kind.is_below else value <= clears_at
        if is_over:
            is_new = self._over_since_ns is None and self.alarm is None
            worse = min if self._kind.is_below else max
            self._worst = value if is_new else worse(self._worst, value)
            self._over_since_ns = time_ns if self._over_since_ns is None else self._over_since_ns
        else:
            self._over_since_ns = None
        if not is_calm:
            self._calm_since_ns = None
        elif self._calm_since_ns is None:
            self._calm_since_ns = time_ns
