"""Finds which requests of a recording's range missed their latency goals, and what delayed each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvscope_telemetry.exports.phase_spans import RequestHistory
from kvscope_telemetry.exports.span import Span
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.request_delays import RequestDelays
from kvscope_telemetry.slo import GOAL_NAMES, GoalResults, Goals, judge, latencies_by_goal, missed_goals_text
from kvscope_telemetry.summaries.session_overview import SessionOverview


@dataclass(frozen=True, slots=True)
class MissedRequest:
    history: RequestHistory
    took_s: dict[str, float]
    missed: tuple[str, ...]
    chain: tuple[str, ...]
    """One text for each delay of the request, as found by `request_delays`, oldest first."""


@dataclass(frozen=True, slots=True)
class GoodputReport:
    goals: Goals
    results: GoalResults
    num_finished: int
    missed: tuple[MissedRequest, ...]
    """Requests that missed a goal, sorted by their largest ratio of latency to goal, worst first; limited to the
    requested count.
    """

    @property
    def num_missed(self) -> int:
        return int(np.count_nonzero(self.results.missed))

    @property
    def share_text(self) -> str:
        return "unknown" if self.results.goodput is None else f"{self.results.goodput:.1%}"

    @property
    def result_text(self) -> str:
        """Text that follows the number of requests that met the goals, such as `of 20 finished requests kept
        TTFT 200 ms and TPOT 50 ms`. Also says how many requests cannot be judged.
        """
        goals = " and ".join(f"{name.upper()} {limit_ms:g} ms" for name, limit_ms in self.goals.items())
        num_unknown = self.num_finished - self.results.num_judged
        unknown = f"; {num_unknown:,} more began or ended unseen" if num_unknown else ""
        return f"of {self.results.num_judged:,} finished requests kept {goals}{unknown}"


def evaluate_goals(
    histories: Sequence[RequestHistory],
    overview: SessionOverview,
    recording: Recording,
    span: Span,
    goals: Goals,
    count: int,
) -> GoodputReport:
    """Judge the requests that finished within `span`, without aborted and refused ones. Only the worst `count` that
    missed a goal are listed, each with its delays.
    """
    finished = [
        history
        for history in histories
        if history.end in ("finished", "ended")
        and history.end_ns is not None
        and span.from_ns <= history.end_ns <= span.until_ns
    ]
    latencies = [latencies_by_goal(history.moments, history.num_output_tokens) for history in finished]
    results = judge(
        {name: np.array([request_latencies[name] for request_latencies in latencies]) for name in GOAL_NAMES}, goals
    )
    ratios = [(-_ratio(latencies[index], goals), index) for index in np.flatnonzero(results.missed).tolist()]
    worst = [index for _, index in sorted(ratios)[:count]]
    events = [overview.events[index] for index in range(len(overview.events))] if worst else []
    limit = recording.info.hello.cache.max_num_seqs
    delays = {
        epoch: RequestDelays((timed.event for timed in events if timed.epoch == epoch), limit)
        for epoch in {finished[index].epoch for index in worst}
    }
    missed = [_missed(finished[index], latencies[index], delays[finished[index].epoch], goals) for index in worst]
    return GoodputReport(goals, results, len(finished), tuple(missed))


def _ratio(latencies: dict[str, float], goals: Goals) -> float:
    return max(float(np.nan_to_num(latencies[name])) * 1e3 / max(limit_ms, 1e-6) for name, limit_ms in goals.items())


def _missed(history: RequestHistory, latencies: dict[str, float], delays: RequestDelays, goals: Goals) -> MissedRequest:
    chain = delays.chain(history.info.number, history.moments, history.num_output_tokens, history.waits_for)
    return MissedRequest(history, latencies, tuple(missed_goals_text(latencies, goals)), chain)
