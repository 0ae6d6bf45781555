"""Figures of a recorded run and of its simulations, taken from the same requests with the same definitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from kvscope_engine.simulator.simulation import Simulation
from kvscope_engine.simulator.workloads.workload import Workload
from kvscope_telemetry.messages.what_if_question import WhatIfFigures

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SimulatedTimes:
    """Times of a simulated run, one for each request of the workload in its order; NaN for a refused request."""

    ttft_s: Floats
    tpot_s: Floats
    ended_s: Floats
    num_preemptions: int
    num_refused: int


def simulated_times(simulation: Simulation) -> SimulatedTimes:
    """Return the times of a simulation that has ended."""
    tally, count = simulation.tally, simulation.num_requests
    ttft, tpot, ended = (np.full(count, np.nan) for _ in range(3))
    indices = np.array(tally.numbers, np.intp) - 1
    arrival_s = np.array([request.arrival_ns for request in simulation.setup.workload.requests], np.float64) / 1e9
    ttft[indices] = np.array(tally.ttft_ns) / 1e9
    tpot[indices] = np.array(tally.decode_ns) / 1e9
    ended[indices] = arrival_s[indices] + np.array(tally.total_ns) / 1e9
    return SimulatedTimes(ttft, tpot, ended, simulation.scheduler.totals.preemptions, tally.num_refused)


class ComparedRequests:
    """Requests of a recorded workload, each with the measured times that are known."""

    def __init__(self, workload: Workload) -> None:
        measured = [request.measured for request in workload.requests]

        def column(name: str) -> Floats:
            return np.array([getattr(times, name) if times is not None else None for times in measured], np.float64)

        self._ttft_s, self._tpot_s, self._ended_s = column("ttft_s"), column("tpot_s"), column("ended_s")
        self._num_output_tokens = np.array([request.num_output_tokens for request in workload.requests])
        self._num_preemptions = sum(times.num_preemptions for times in measured if times is not None)

    @property
    def has_times(self) -> bool:
        """Whether the first token of some request was observed."""
        return bool(np.isfinite(self._ttft_s).any())

    def measured(self) -> WhatIfFigures:
        return self._figures(self._ttft_s, self._tpot_s, self._ended_s, self._num_preemptions, 0)

    def simulated(self, runs: Sequence[SimulatedTimes]) -> WhatIfFigures:
        """Return the median of each figure over simulations of the same settings."""
        figures = [
            self._figures(run.ttft_s, run.tpot_s, run.ended_s, run.num_preemptions, run.num_refused) for run in runs
        ]
        return WhatIfFigures(
            ttft_p50_s=_median([each.ttft_p50_s for each in figures]),
            ttft_p99_s=_median([each.ttft_p99_s for each in figures]),
            tpot_p50_s=_median([each.tpot_p50_s for each in figures]),
            tpot_p99_s=_median([each.tpot_p99_s for each in figures]),
            tokens_per_s=_median([each.tokens_per_s for each in figures]),
            num_preemptions=_median([each.num_preemptions for each in figures]),
            num_refused=figures[0].num_refused,
        )

    def _figures(
        self, ttft_s: Floats, tpot_s: Floats, ended_s: Floats, num_preemptions: int, num_refused: int
    ) -> WhatIfFigures:
        ttft = ttft_s[np.isfinite(self._ttft_s) & np.isfinite(ttft_s)]
        tpot = tpot_s[np.isfinite(self._tpot_s) & np.isfinite(tpot_s)]
        has_ended = np.isfinite(self._ended_s) & np.isfinite(ended_s)
        span_s = float(ended_s[has_ended].max()) if has_ended.any() else 0.0
        return WhatIfFigures(
            ttft_p50_s=_percentile(ttft, 50),
            ttft_p99_s=_percentile(ttft, 99),
            tpot_p50_s=_percentile(tpot, 50),
            tpot_p99_s=_percentile(tpot, 99),
            tokens_per_s=float(self._num_output_tokens[has_ended].sum()) / span_s if span_s else None,
            num_preemptions=num_preemptions,
            num_refused=num_refused,
        )


def _percentile(values: Floats, percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values.size else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
