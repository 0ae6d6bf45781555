"""Compares a recorded run with simulations of its settings and of changed settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from kvscope_engine.simulator.simulation import SimulationSetup
from kvscope_engine.simulator.what_if.compared_figures import ComparedRequests
from kvscope_engine.simulator.what_if.parallel_simulations import simulate_all
from kvscope_engine.simulator.workload_recording import WorkloadRecording
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.what_if_question import WhatIfComparison

_RUNS_BY_TOKENS: Final = ((20_000, 9), (100_000, 3))
"""Number of simulations for a run with up to so many output tokens; 1 if there are more. In a short run, small
differences of step times change percentiles and preemptions considerably.
"""
_SMALL_VARIATION: Final = 1e-3


def compare_with_recording(
    run: WorkloadRecording,
    unchanged: SimulationSetup,
    changed: SimulationSetup,
    report: Callable[[float], object],
    notes: tuple[str, ...] = (),
) -> WhatIfComparison:
    """Simulate both setups, and return their figures and the measured ones.

    Raises BadInput if the recording contains no time of a first token, or for a setup that is not accepted.
    """
    requests = ComparedRequests(run.workload)
    if not requests.has_times:
        raise BadInput("no request of the recording has got its first token yet, so nothing can be compared")
    variation = () if run.costs is None else run.costs.variation
    num_runs = 1 if not variation or np.std(variation) < _SMALL_VARIATION else _num_runs(run)
    setups = [
        replace(setup, variation=variation, seed=seed) for setup in (unchanged, changed) for seed in range(num_runs)
    ]
    times = simulate_all(setups, report)
    return WhatIfComparison(
        measured=requests.measured(),
        unchanged=requests.simulated(times[:num_runs]),
        changed=requests.simulated(times[num_runs:]),
        num_requests=len(run.workload.requests),
        num_runs=num_runs,
        notes=notes,
    )


def _num_runs(run: WorkloadRecording) -> int:
    num_tokens = sum(request.num_output_tokens for request in run.workload.requests)
    return next((num_runs for max_tokens, num_runs in _RUNS_BY_TOKENS if num_tokens <= max_tokens), 1)
