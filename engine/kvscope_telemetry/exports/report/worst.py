"""Finds which requests had the worst delays, and describes their causes from events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvscope_telemetry.exports.phase_spans import PhaseSpan, RequestHistory
from kvscope_telemetry.request_phase import PREEMPTED_PHASES, WAITING_PHASES, RequestPhase

_NOTABLE_NS = 50_000_000
_SLOW_PREFILL_NS = 1_000_000_000
"""Duration from which a prefill counts as a delay. Each prompt takes some time to compute."""


@dataclass(frozen=True, slots=True)
class WorstRequest:
    """A request, and the time that it lost (`lost_ns`): in the queue, in a slow prefill, or preempted."""

    history: RequestHistory
    lost_ns: int
    reasons: tuple[str, ...]


def worst_requests(histories: Sequence[RequestHistory], until_ns: int, count: int) -> list[WorstRequest]:
    """Return the `count` worst requests: refused ones, then those that waited longest."""
    rated = [(history.end == "refused", _wait_ns(history, until_ns), history) for history in histories]
    rated = [each for each in rated if each[0] or each[1] >= _NOTABLE_NS]
    rated.sort(key=lambda each: (not each[0], -each[1], each[2].info.number))
    return [WorstRequest(history, lost_ns, tuple(_reasons(history, until_ns))) for _, lost_ns, history in rated[:count]]


def stopped_time_note(history: RequestHistory, phases: Sequence[PhaseSpan], until_ns: int) -> str:
    """Return a text on the stopped time that is excluded from the length of `phases`; "" if there is none."""
    stopped_ns = sum(history.stopped_ns(phase, until_ns) for phase in phases)
    return f" (without {stopped_ns / 1e9:.2f} s {history.stopped_text(phases, until_ns)})" if stopped_ns else ""


def _wait_ns(history: RequestHistory, until_ns: int) -> int:
    waiting_phases = WAITING_PHASES
    idle_ns = sum(history.length_ns(phase, until_ns) for phase in history.phases if phase.kind in waiting_phases)
    return idle_ns + _slow_prefill_ns(history, until_ns)


def _slow_prefill_ns(history: RequestHistory, until_ns: int) -> int:
    prefill = [phase for phase in history.phases if phase.kind is RequestPhase.PREFILL]
    took_ns = sum(history.length_ns(phase, until_ns) for phase in prefill)
    return took_ns if took_ns >= _SLOW_PREFILL_NS else 0


def _reasons(history: RequestHistory, until_ns: int) -> list[str]:
    reasons = []
    queued = [phase for phase in history.phases if phase.kind is RequestPhase.QUEUED]
    queued_ns = sum(history.length_ns(phase, until_ns) for phase in queued)
    if queued_ns >= _NOTABLE_NS:
        reasons.append(f"waited {queued_ns / 1e9:.2f} s in the queue{stopped_time_note(history, queued, until_ns)}")
    if prefill_ns := _slow_prefill_ns(history, until_ns):
        prompt = f"{history.info.num_prompt_tokens:,} prompt tokens, {history.num_cached_tokens:,} cached"
        reasons.append(f"prefill took {prefill_ns / 1e9:.2f} s: {prompt}")
    for phase in history.phases:
        if phase.kind in PREEMPTED_PHASES:
            for_request = (
                f" for request #{phase.preemptor_number}"
                if phase.preemptor_number not in (0, history.info.number)
                else ""
            )
            verb = "swapped out" if phase.kind is RequestPhase.SWAPPED else "preempted"
            cause = f": {phase.cause}" if phase.cause else ""
            preempted_s = history.length_ns(phase, until_ns) / 1e9
            reasons.append(
                f"{verb}{for_request}, {preempted_s:.2f} s aside{stopped_time_note(history, [phase], until_ns)}{cause}"
            )
    if history.end in ("refused", "aborted"):
        reasons.append(f"{history.end}: {history.end_reason}" if history.end_reason else history.end)
    return reasons or ["several short waits"]
