"""Fits a cost model in which all costs of a step add up, as on a CPU, to measured steps.

A step takes `o + r x requests + t x tokens + k x context + p x pairs` seconds; the five non-negative rates are fitted.
The residual of a step is weighted by the inverse of its measured time, as if the variance grew with the time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvscope_engine.simulator.costs.cost_fit import FREE_RATE, Fit, Floats, Sample, nonnegative_least_squares
from kvscope_engine.simulator.costs.cost_model import CostModel

_PAIR_FLOPS = 1e6
"""Assumed FLOPs per pair; only the fitted rate depends on it."""


def fit_additive(samples: Sequence[Sample], kv_bytes_per_token: float) -> Fit:
    """Return the additive cost model that fits `samples` best."""
    features = np.array([(1.0, s.num_requests, s.num_tokens, s.context, s.pairs) for s in samples], np.float64)
    seconds = np.array([sample.seconds for sample in samples])
    weights = 1 / np.sqrt(seconds)
    solution = nonnegative_least_squares(features * weights[:, None], seconds * weights)
    overhead, per_request, per_token, per_context, per_pair = solution.tolist()
    cost = CostModel(
        weight_bytes=0,
        kv_bytes_per_token=kv_bytes_per_token,
        flops_per_token=0,
        attention_flops_per_pair=_PAIR_FLOPS if per_pair else 0,
        memory_bandwidth=FREE_RATE,
        flops_per_second=_PAIR_FLOPS / per_pair if per_pair else FREE_RATE,
        step_overhead_s=overhead,
        request_overhead_s=per_request,
        token_overhead_s=per_token,
        context_overhead_s=per_context,
    )
    return Fit(cost, tuple((features @ solution).tolist()))


def weighted_error(predicted_s: Sequence[float], samples: Sequence[Sample]) -> float:
    """Return the sum of the squared residuals, each divided by the measured time."""
    seconds: Floats = np.array([sample.seconds for sample in samples])
    return float((np.square(np.array(predicted_s) - seconds) / seconds).sum())
