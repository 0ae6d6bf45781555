"""Which requests of a recording's range missed their goals, and what delayed each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvscope_telemetry.delays import Delays
from kvscope_telemetry.exports.lives import Life
from kvscope_telemetry.exports.span import Exported, Span
from kvscope_telemetry.goals import GOAL_NAMES, Goals, Judged, judge, missed_words, took_s
from kvscope_telemetry.summaries.course import Course


@dataclass(frozen=True, slots=True)
class MissedRequest:
    """One that missed a goal."""

    life: Life
    took_s: dict[str, float]
    missed: tuple[str, ...]
    """Each goal that it missed, in words."""
    chain: tuple[str, ...]
    """What delayed it, oldest first (`delays`)."""


@dataclass(frozen=True, slots=True)
class GoalsKept:
    """Of the requests that finished in the range."""

    goals: Goals
    judged: Judged
    num_finished: int
    missed: tuple[MissedRequest, ...]
    """The worst first, by how many times the goal each took; no more than were asked for."""

    @property
    def num_missed(self) -> int:
        """All of them."""
        return int(np.count_nonzero(self.judged.missed))

    @property
    def share_text(self) -> str:
        """`95.0%`."""
        return "unknown" if self.judged.goodput is None else f"{self.judged.goodput:.1%}"

    @property
    def of_text(self) -> str:
        """`of 20 finished requests kept TTFT 200 ms and TPOT 50 ms`, and how many cannot be judged."""
        goals = " and ".join(f"{name.upper()} {limit_ms:g} ms" for name, limit_ms in self.goals.items())
        num_unknown = self.num_finished - self.judged.num_judged
        unknown = f"; {num_unknown:,} more began or ended unseen" if num_unknown else ""
        return f"of {self.judged.num_judged:,} finished requests kept {goals}{unknown}"


def goals_kept(
    lives: Sequence[Life], course: Course, recording: Exported, span: Span, goals: Goals, count: int
) -> GoalsKept:
    """Of those that finished from `span.from_ns` to `span.until_ns`; aborted and refused ones are not judged. What
    delayed them is told of the worst `count`."""
    finished = [
        life
        for life in lives
        if life.end in ("finished", "ended")
        and life.end_ns is not None
        and span.from_ns <= life.end_ns <= span.until_ns
    ]
    each = [took_s(life.moments, life.num_output_tokens) for life in finished]
    judged = judge({name: np.array([one[name] for one in each]) for name in GOAL_NAMES}, goals)
    rated = [(-_ratio(each[place], goals), place) for place in np.flatnonzero(judged.missed).tolist()]
    worst = [place for _, place in sorted(rated)[:count]]
    told = [course.events[place] for place in range(len(course.events))] if worst else []
    limit = recording.info.hello.cache.max_num_seqs
    delays = {
        epoch: Delays((timed.event for timed in told if timed.epoch == epoch), limit)
        for epoch in {finished[place].epoch for place in worst}
    }
    missed = [_missed(finished[place], each[place], delays[finished[place].epoch], goals) for place in worst]
    return GoalsKept(goals, judged, len(finished), tuple(missed))


def _ratio(took: dict[str, float], goals: Goals) -> float:
    return max(float(np.nan_to_num(took[name])) * 1e3 / max(limit_ms, 1e-6) for name, limit_ms in goals.items())


def _missed(life: Life, took: dict[str, float], delays: Delays, goals: Goals) -> MissedRequest:
    chain = delays.chain(life.info.number, life.moments, life.num_output_tokens)
    return MissedRequest(life, took, tuple(missed_words(took, goals)), chain)
