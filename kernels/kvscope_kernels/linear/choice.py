"""Measures at startup whether our kernels or torch are faster for matmuls of few rows with a model's weights."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvscope_kernels.graph_timing import Call, capture, replay_s
from kvscope_kernels.linear.skinny_linear import ALWAYS, MAX_ROWS, FewRows, Linear, linear, linear_torch

_MAX_TIME_RATIO: Final = 0.97
"""Maximum time of our kernels, divided by torch's, for which our kernels are used. The gain must exceed the
noise of the measurement.
"""
_TOLERANCE: Final = 0.02
"""Allowed difference from torch's result, relative to the largest absolute value of that result."""
_ROUNDS: Final = 5
_CYCLE_BYTES: Final = 512 << 20
"""Bytes of different weights that are multiplied one after the other while measuring: more than a GPU's caches
hold. Models with fewer bytes are measured in the cache, as their weights stay there while serving, too.
"""
_SEVERAL_ROWS: Final = (4, MAX_ROWS)

Clock = Callable[[Sequence[Call]], Callable[[], float]]
"""Prepares calls that run in sequence, and returns a function that measures the seconds of all calls together."""


class RelativeTimes(NamedTuple):
    """Time of our kernels divided by torch's, for weights of one shape."""

    single: float
    """Ratio for one row; infinite if the kernels fail or give a wrong result."""
    several: float
    """Ratio that decides for 2 to `MAX_ROWS` rows, measured with 4 and `MAX_ROWS`; infinite if the kernels fail
    or give a wrong result.
    """

    @property
    def few_rows(self) -> FewRows:
        """Numbers of rows for which our kernels should be used."""
        return FewRows(self.single < _MAX_TIME_RATIO, self.several < _MAX_TIME_RATIO)


def time_by_graphs(calls: Sequence[Call]) -> Callable[[], float]:
    """`Clock` for GPUs. It replays the calls as a CUDA graph, so that the host's launch overhead is not measured."""
    return partial(replay_s, capture(calls))


def times_against_torch(weights: Sequence[Tensor], dtype: torch.dtype, clock: Clock = time_by_graphs) -> RelativeTimes:
    """Measure matmuls with weights of one shape, such as those of a model's layers. `dtype` is the dtype of the
    result.
    """
    cycle = weights[: max(1, -(-_CYCLE_BYTES // max(1, weights[0].nbytes)))]
    return RelativeTimes(_ratio(cycle, dtype, (1,), clock), _ratio(cycle, dtype, _SEVERAL_ROWS, clock))


def _ratio(weights: Sequence[Tensor], dtype: torch.dtype, rows: Sequence[int], clock: Clock) -> float:
    try:
        times = [_times(weights, dtype, count, clock) for count in rows]
    except Exception:  # errors of compiler, assembler or driver have many types: do not use the kernels
        return float("inf")
    return sum(ours for ours, _ in times) / sum(theirs for _, theirs in times)


def _times(weights: Sequence[Tensor], dtype: torch.dtype, rows: int, clock: Clock) -> tuple[float, float]:
    """Return the kernels' time and torch's in seconds, measured alternately. The kernels' time is infinite if
    their result is wrong.
    """
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
