"""Fits a cost model to measured steps: finds the non-negative rates that explain their durations best.

A step takes `max(w + k x context, f x tokens + p x pairs) + o` seconds (`cost_model`); `w, k, f, p, o` are fitted. The
larger of the two terms is not known in advance. An assignment of steps to terms is guessed, which leaves a linear
problem, and the assignment is updated from the solution until it no longer changes. Residuals are relative, so a short
step counts as much as a long one.

Several sets of rates may explain the times equally well: on a device that is limited by compute, any memory cost below
the compute time fits. Then the set with the fewest rates is chosen. Errors that differ by less than clocks can measure
count as equal, so that rounding does not decide. Does not use scipy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvscope_engine.simulator.costs.cost_model import CostModel
from kvscope_telemetry.errors import KvscopeError

MAX_ROUNDS: Final = 50
MIN_SAMPLES: Final = 5
EQUAL_ERROR: Final = 1e-9
"""Smallest difference of errors that distinguishes two solutions. The error of a solution is the root mean
square of the relative errors of step times.
"""
FREE_RATE: Final = 1e18
"""Rate in bytes/s or FLOP/s that is used if the measurements show no cost."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured step.

    `context`: number of positions attended to, summed over requests. `pairs`: number of (token, attended position)
    pairs.
    """

    num_tokens: int
    context: int
    pairs: int
    seconds: float
    num_requests: int = 1


@dataclass(frozen=True, slots=True)
class ModelSizes:
    weight_bytes: float
    kv_bytes_per_token: float
    flops_per_token: float
    attention_flops_per_pair: float


@dataclass(frozen=True, slots=True)
class Fit:
    cost: CostModel
    predicted_s: tuple[float, ...]


def fit_costs(samples: Sequence[Sample], sizes: ModelSizes) -> Fit:
    """Return the cost model that fits `samples`. Raises KvscopeError if there are fewer than `MIN_SAMPLES`.

    Weights and dense layers keep the sizes in `sizes`, and one bandwidth and one FLOP rate are fitted to them. The
    sizes of KV and attention are then chosen so that they explain the measured times at these rates. A quantity whose
    cost does not show in any step gets no cost.
    """
    if len(samples) < MIN_SAMPLES:
        raise KvscopeError(f"{len(samples)} steps were timed: at least {MIN_SAMPLES} are needed for five costs")
    memory, compute = _terms(samples)
    seconds = np.array([sample.seconds for sample in samples])
    # Two initial guesses: steps with more than one token per request are compute-bound, and all steps are.
    guesses = (np.array([s.pairs > s.context for s in samples]), np.ones(len(samples), np.bool_))
    solutions = [_fit_assignment(memory, compute, seconds, is_compute) for is_compute in guesses]
    best, best_error = np.zeros(5), np.inf
    for solution in sorted(solutions, key=np.count_nonzero):
        error = float(np.square(_predict(solution, memory, compute) / seconds - 1).sum())
        if error < best_error - EQUAL_ERROR**2 * len(samples):
            best, best_error = solution, error
    return Fit(_cost_model(best, sizes), tuple(_predict(best, memory, compute).tolist()))


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Return `x >= 0`, shape (m,), that minimizes `|matrix @ x - target|`, by trying all sets of columns.

    Among equally good sets the smallest is chosen; a column of zeros gets 0. Only for few columns. `matrix` has shape
    (n, m).
    """
    scale = np.linalg.norm(matrix, axis=0)
    usable = np.flatnonzero(scale).tolist()
    scaled = matrix / np.where(scale, scale, 1.0)
    total = float(np.square(target).sum())
    best, least_error = np.zeros(matrix.shape[1]), total
    for count in range(1, len(usable) + 1):
        for columns in map(list, combinations(usable, count)):
            solution = np.linalg.lstsq(scaled[:, columns], target, rcond=None)[0]
            error = float(np.square(scaled[:, columns] @ solution - target).sum())
            if (solution >= 0).all() and error < least_error - EQUAL_ERROR**2 * total:
                best, least_error = np.zeros(matrix.shape[1]), error
                best[columns] = solution / scale[columns]
    return best


def _terms(samples: Sequence[Sample]) -> tuple[Floats, Floats]:
    """Return the factors of `w, k` (memory) and of `f, p` (compute), each of shape (n, 2)."""
    memory = np.array([(1.0, sample.context) for sample in samples])
    compute = np.array([(sample.num_tokens, sample.pairs) for sample in samples], np.float64)
    return memory, compute


def _fit_assignment(memory: Floats, compute: Floats, seconds: Floats, is_compute: NDArray[np.bool_]) -> Floats:
    solution = np.zeros(5)
    for _ in range(MAX_ROUNDS):
        rows = np.hstack([memory * ~is_compute[:, None], compute * is_compute[:, None], np.ones((len(memory), 1))])
        solution = nonnegative_least_squares(rows / seconds[:, None], np.ones(len(memory)))
        updated = compute @ solution[2:4] > memory @ solution[:2]
        if np.array_equal(updated, is_compute):
            break
        is_compute = updated
    return solution


def _predict(solution: Floats, memory: Floats, compute: Floats) -> Floats:
    predicted: Floats = np.maximum(memory @ solution[:2], compute @ solution[2:4]) + solution[4]
    return predicted


def _cost_model(solution: Floats, sizes: ModelSizes) -> CostModel:
    w, k, f, p, o = solution.tolist()
    bandwidth = sizes.weight_bytes / w if w else sizes.kv_bytes_per_token / k if k else FREE_RATE
    rate = sizes.flops_per_token / f if f else sizes.attention_flops_per_pair / p if p else FREE_RATE
    return CostModel(
        weight_bytes=w * bandwidth,
        kv_bytes_per_token=k * bandwidth,
        flops_per_token=f * rate,
        attention_flops_per_pair=p * rate,
        memory_bandwidth=bandwidth,
        flops_per_second=rate,
        step_overhead_s=o,
    )
