"""Which requests had the worst of it, and why: in words that are made of what happened to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvscope_telemetry.exports.lives import Life, PhaseKind

_NOTABLE_NS = 50_000_000


@dataclass(frozen=True, slots=True)
class WorstRequest:
    """One, and how much of its time went by without it being served."""

    life: Life
    lost_ns: int
    reasons: tuple[str, ...]


def worst_requests(lives: Sequence[Life], until_ns: int, count: int) -> list[WorstRequest]:
    """Those that were turned away, then those that waited and stood aside longest, the worst first."""
    rated = [(life.end == "refused", _lost_ns(life, until_ns), life) for life in lives]
    rated = [each for each in rated if each[0] or each[1] >= _NOTABLE_NS]
    rated.sort(key=lambda each: (not each[0], -each[1], each[2].info.number))
    return [WorstRequest(life, lost_ns, tuple(_reasons(life, until_ns))) for _, lost_ns, life in rated[:count]]


def without(stopped_ns: int) -> str:
    """What is left out of a length of time; empty where the engine never stood still in it."""
    return f" (without {stopped_ns / 1e9:.2f} s paused)" if stopped_ns else ""


def _lost_ns(life: Life, until_ns: int) -> int:
    idle = (PhaseKind.QUEUED, PhaseKind.PREEMPTED, PhaseKind.SWAPPED)
    return sum(life.length_ns(phase, until_ns) for phase in life.phases if phase.kind in idle)


def _reasons(life: Life, until_ns: int) -> list[str]:
    reasons = []
    queued = [phase for phase in life.phases if phase.kind is PhaseKind.QUEUED]
    queued_ns = sum(life.length_ns(phase, until_ns) for phase in queued)
    if queued_ns >= _NOTABLE_NS:
        stopped_ns = sum(life.stopped_ns(phase, until_ns) for phase in queued)
        reasons.append(f"waited {queued_ns / 1e9:.2f} s in the queue{without(stopped_ns)}")
    for phase in life.phases:
        if phase.kind in (PhaseKind.PREEMPTED, PhaseKind.SWAPPED):
            whom = f" for request #{phase.other}" if phase.other not in (0, life.info.number) else ""
            verb = "swapped out" if phase.kind is PhaseKind.SWAPPED else "preempted"
            cause = f": {phase.cause}" if phase.cause else ""
            aside_s, stopped_ns = life.length_ns(phase, until_ns) / 1e9, life.stopped_ns(phase, until_ns)
            reasons.append(f"{verb}{whom}, {aside_s:.2f} s aside{without(stopped_ns)}{cause}")
    if life.end in ("refused", "aborted"):
        reasons.append(f"{life.end}: {life.end_reason}" if life.end_reason else life.end)
    return reasons or ["several short waits"]
