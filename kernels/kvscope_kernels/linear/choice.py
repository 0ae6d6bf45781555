"""Whether products of few rows are faster by the kernels or by torch, measured at a start on a model's weights."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvscope_kernels.graph_timing import Call, capture, replay_s
from kvscope_kernels.linear.skinny_linear import ALWAYS, MAX_ROWS, FewRows, Linear, linear, linear_torch

_WORTH: Final = 0.97
"""Of torch's time: what is gained must be more than timing's own noise."""
_TOLERANCE: Final = 0.02
"""Of the largest number."""
_ROUNDS: Final = 5
_CYCLE_BYTES: Final = 512 << 20
"""Of weights read in turn, which is more than a cache of a GPU holds; smaller models are in it in service, too."""
_SEVERAL: Final = (4, MAX_ROWS)

Clock = Callable[[Sequence[Call]], Callable[[], float]]
"""Prepares calls that are made one after the other; then seconds of all of them, each time it is asked."""


class Beside(NamedTuple):
    """The kernels' time over torch's for weights of one shape."""

    one: float
    """For a row; infinite where the kernels fail, or compute something else."""
    several: float
    """For 2 to `MAX_ROWS` of them."""

    @property
    def few(self) -> FewRows:
        """What the kernels take."""
        return FewRows(self.one < _WORTH, self.several < _WORTH)


def by_graphs(calls: Sequence[Call]) -> Callable[[], float]:
    """A `Clock` of a GPU: what the host takes for launches does not count, as in a step that is a graph."""
    return partial(replay_s, capture(calls))


def beside_torch(weights: Sequence[Tensor], dtype: torch.dtype, clock: Clock = by_graphs) -> Beside:
    """Measured on weights of one shape, such as those of a model's layers; `dtype` is the result's."""
    cycle = weights[: max(1, -(-_CYCLE_BYTES // max(1, weights[0].nbytes)))]
    return Beside(_ratio(cycle, dtype, (1,), clock), _ratio(cycle, dtype, _SEVERAL, clock))


def _ratio(weights: Sequence[Tensor], dtype: torch.dtype, rows: Sequence[int], clock: Clock) -> float:
    try:
        times = [_times(weights, dtype, count, clock) for count in rows]
    except Exception:  # a compiler's, an assembler's or a driver's refusal, of many types: the kernels are not taken
        return float("inf")
    return sum(ours for ours, _ in times) / sum(theirs for _, theirs in times)


def _times(weights: Sequence[Tensor], dtype: torch.dtype, rows: int, clock: Clock) -> tuple[float, float]:
    """Ours and torch's, in turns; ours infinite where it is another product."""
    like = weights[0]
    own = torch.Generator().manual_seed(0)  # the user's stays where it is
    x = torch.randn(rows, like.shape[1], generator=own).to(like)
    given = x, like, None, dtype, ALWAYS
    if not _is_close(linear(*given), linear_torch(*given)):
        return float("inf"), 1.0
    samplers = [clock(_calls(product, x, weights, dtype)) for product in (linear, linear_torch)]
    samples = [[sample() for sample in samplers] for _ in range(_ROUNDS)]
    our_time, their_time = (min(column) for column in zip(*samples, strict=True))
    return our_time, their_time


def _calls(product: Linear, x: Tensor, weights: Sequence[Tensor], dtype: torch.dtype) -> list[Call]:
    return [partial(product, x, weight, None, dtype, ALWAYS) for weight in weights]


def _is_close(found: Tensor, expected: Tensor) -> bool:
    difference = (found.float() - expected.float()).abs().max()
    return bool(difference <= _TOLERANCE * expected.float().abs().max())
