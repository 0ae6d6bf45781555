"""Alarms and rules in words."""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.alarms.alarm_engine import Alarm
from kvscope_telemetry.alarms.rules import (
    FRAMES_LOST,
    HOT,
    KINDS,
    KV_USAGE,
    PREEMPTIONS,
    RUN_OUT,
    STUCK,
    WAITING,
    Rule,
)
from kvscope_telemetry.summaries.bookmark import Bookmark

_WORST: Final = {
    KV_USAGE: "up to {:.1f} %",
    PREEMPTIONS: "up to {:.1f} a second",
    WAITING: "up to {:.0f} s before its first step",
    RUN_OUT: "gone in {:.0f} s at that rate",
    HOT: "up to {:.0f} °C",
    FRAMES_LOST: "{:.0f} frames",
    STUCK: "no step ended for {:.0f} s",
}


def title_of(kind: str) -> str:
    """What an alarm is called; one of a later version by its name."""
    known = KINDS.get(kind)
    return kind.replace("_", " ").capitalize() if known is None else known.title


def rule_text(rule: Rule) -> str:
    """`KV usage over 95 % for 5 s`."""
    kind = KINDS[rule.kind]
    over = f" {kind.before_seconds} {rule.seconds:g} s" if kind.has_seconds and rule.seconds else ""
    if rule.kind == FRAMES_LOST and not rule.threshold:
        return f"Any frame lost{over}"
    limit = f"{rule.threshold:g}{'' if kind.unit.startswith('/') or not kind.unit else ' '}{kind.unit}"
    return f"{kind.condition} {limit}{over}"


def alarm_text(alarm: Alarm) -> str:
    """What was so bad."""
    return _WORST[alarm.kind].format(alarm.worst)


def bookmark_of(alarm: Alarm) -> Bookmark:
    """The same alarm has the same bookmark, wherever it rings; what becomes of it is said in a later revision."""
    return Bookmark(
        bookmark_id=f"{alarm.kind}-{alarm.epoch:x}-{alarm.begin_ns:x}",
        time_ns=alarm.begin_ns,
        until_ns=alarm.until_ns,
        kind=alarm.kind,
        text=alarm_text(alarm),
        revision=1 if alarm.until_ns else 0,
    )
