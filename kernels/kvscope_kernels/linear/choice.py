"""Measures at startup whether the kernels or torch are faster for products of few rows with a model's weights."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvscope_kernels.graph_timing import Call, capture, replay_s
from kvscope_kernels.linear.skinny_linear import ALWAYS, MAX_ROWS, FewRows, Linear, linear, linear_torch

_MAX_TIME_RATIO: Final = 0.97
"""Maximum time relative to torch's for which the kernels are used. The gain must exceed the noise of the measurement.
"""
_TOLERANCE: Final = 0.02
"""Tolerance relative to the largest number."""
_ROUNDS: Final = 5
_CYCLE_BYTES: Final = 512 << 20
"""Bytes of weights read in turn, more than a GPU's caches hold. Smaller models stay in the cache while serving, too."""
_SEVERAL_ROWS: Final = (4, MAX_ROWS)

Clock = Callable[[Sequence[Call]], Callable[[], float]]
"""Prepares calls that run in sequence, and returns a function that measures the seconds of all of them."""


class RelativeTimes(NamedTuple):
    """Time of the kernels relative to torch's, for weights of one shape."""

    single: float
    """Ratio for one row; infinite if the kernels fail or give a wrong result."""
    several: float
    """Ratio for 2 to `MAX_ROWS` rows."""

    @property
    def few_rows(self) -> FewRows:
        """Numbers of rows for which the kernels should be used."""
        return FewRows(self.single < _MAX_TIME_RATIO, self.several < _MAX_TIME_RATIO)


def time_by_graphs(calls: Sequence[Call]) -> Callable[[], float]:
    """`Clock` for GPUs. It replays the calls as a CUDA graph, so that the host's launch overhead is not measured."""
    return partial(replay_s, capture(calls))


def times_against_torch(weights: Sequence[Tensor], dtype: torch.dtype, clock: Clock = time_by_graphs) -> RelativeTimes:
    """Measure on weights of one shape, such as those of a model's layers. `dtype` is that of the result."""
    cycle = weights[: max(1, -(-_CYCLE_BYTES // max(1, weights[0].nbytes)))]
    return RelativeTimes(_ratio(cycle, dtype, (1,), clock), _ratio(cycle, dtype, _SEVERAL_ROWS, clock))


def _ratio(weights: Sequence[Tensor], dtype: torch.dtype, rows: Sequence[int], clock: Clock) -> float:
    try:
        times = [_times(weights, dtype, count, clock) for count in rows]
    except Exception:  # errors of compiler, assembler or driver have many types: do not use the kernels
        return float("inf")
    return sum(ours for ours, _ in times) / sum(theirs for _, theirs in times)


def _times(weights: Sequence[Tensor], dtype: torch.dtype, rows: int, clock: Clock) -> tuple[float, float]:
    """Return our time and torch's, measured alternately; ours is infinite if the result is wrong."""
    weight = weights[0]
    generator = torch.Generator().manual_seed(0)  # do not advance the global generator
    x = torch.randn(rows, weight.shape[1], generator=generator).to(weight)
    arguments = x, weight, None, dtype, ALWAYS
    if not _is_close(linear(*arguments), linear_torch(*arguments)):
        return float("inf"), 1.0
    samplers = [clock(_calls(product, x, weights, dtype)) for product in (linear, linear_torch)]
    samples = [[sample() for sample in samplers] for _ in range(_ROUNDS)]
    our_time, their_time = (min(column) for column in zip(*samples, strict=True))
    return our_time, their_time


def _calls(product: Linear, x: Tensor, weights: Sequence[Tensor], dtype: torch.dtype) -> list[Call]:
    return [partial(product, x, weight, None, dtype, ALWAYS) for weight in weights]


def _is_close(result: Tensor, expected: Tensor) -> bool:
    difference = (result.float() - expected.float()).abs().max()
    return bool(difference <= _TOLERANCE * expected.float().abs().max())
