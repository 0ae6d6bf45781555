"""Finds which requests had the worst delays, and describes their causes from events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvscope_telemetry.exports.phase_spans import PhaseKind, RequestHistory

_NOTABLE_NS = 50_000_000


@dataclass(frozen=True, slots=True)
class WorstRequest:
    """A request, and how much of its time passed without it being served."""

    history: RequestHistory
    lost_ns: int
    reasons: tuple[str, ...]


def worst_requests(histories: Sequence[RequestHistory], until_ns: int, count: int) -> list[WorstRequest]:
    """Those that were turned away, then those that waited and stood aside longest, the worst first."""
    rated = [(history.end == "refused", _lost_ns(history, until_ns), history) for history in histories]
    rated = [each for each in rated if each[0] or each[1] >= _NOTABLE_NS]
    rated.sort(key=lambda each: (not each[0], -each[1], each[2].info.number))
    return [WorstRequest(history, lost_ns, tuple(_reasons(history, until_ns))) for _, lost_ns, history in rated[:count]]


def without(stopped_ns: int) -> str:
    """What is left out of a length of time; empty where the engine never stood still in it."""
    return f" (without {stopped_ns / 1e9:.2f} s paused)" if stopped_ns else ""


def _lost_ns(history: RequestHistory, until_ns: int) -> int:
    idle = (PhaseKind.QUEUED, PhaseKind.PREEMPTED, PhaseKind.SWAPPED)
    return sum(history.length_ns(phase, until_ns) for phase in history.phases if phase.kind in idle)


def _reasons(history: RequestHistory, until_ns: int) -> list[str]:
    reasons = []
    queued = [phase for phase in history.phases if phase.kind is PhaseKind.QUEUED]
    queued_ns = sum(history.length_ns(phase, until_ns) for phase in queued)
    if queued_ns >= _NOTABLE_NS:
        stopped_ns = sum(history.stopped_ns(phase, until_ns) for phase in queued)
        reasons.append(f"waited {queued_ns / 1e9:.2f} s in the queue{without(stopped_ns)}")
    for phase in history.phases:
        if phase.kind in (PhaseKind.PREEMPTED, PhaseKind.SWAPPED):
            whom = f" for request #{phase.other}" if phase.other not in (0, history.info.number) else ""
            verb = "swapped out" if phase.kind is PhaseKind.SWAPPED else "preempted"
            cause = f": {phase.cause}" if phase.cause else ""
            aside_s, stopped_ns = history.length_ns(phase, until_ns) / 1e9, history.stopped_ns(phase, until_ns)
            reasons.append(f"{verb}{whom}, {aside_s:.2f} s aside{without(stopped_ns)}{cause}")
    if history.end in ("refused", "aborted"):
        reasons.append(f"{history.end}: {history.end_reason}" if history.end_reason else history.end)
    return reasons or ["several short waits"]
